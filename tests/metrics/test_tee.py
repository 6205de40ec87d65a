"""A log that cannot be written never hides what a rank says."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from rldsl.runtime.metrics.tee import Tee, tee


def test_it_goes_to_both(tmp_path: Path) -> None:
    screen = io.StringIO()
    stream = tee(screen, tmp_path, 0, False)
    print("hello", file=stream, flush=True)
    assert screen.getvalue() == (tmp_path / "log/rank-0.log").read_text() == "hello\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("buffering", [1, 4096])
def test_a_full_disk_ends_the_log_and_not_the_run(buffering: int) -> None:
    screen = io.StringIO()
    with io.TextIOWrapper(io.BufferedWriter(io.FileIO("/dev/full", "w"), buffering), line_buffering=True) as full:
        stream = Tee(screen, full)
        for _ in range(3):
            print("error[RL0708]: the disk is full", file=stream, flush=True)
        with pytest.raises(ValueError):
            full.write("")  # it is closed
    assert screen.getvalue().count("RL0708") == 3 and stream.log is None


def test_a_screen_that_nobody_reads_silences_it_and_does_not_end_the_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", buffering=1) as screen:
        stream = tee(screen, tmp_path, 0, False)
        print("one", file=stream, flush=True)
        os.close(read)
        for _ in range(2):
            print("two", file=stream, flush=True)
    assert (tmp_path / "log/rank-0.log").read_text() == "one\ntwo\ntwo\n"
