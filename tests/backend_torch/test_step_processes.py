"""The processes of systems that `benchmarks/` measures: their ranks, how failures are named, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.step_processes import ROOT, Times, measured
from benchmarks.step_work import Work

SYSTEM = "tests.backend_torch.step_system"
FAILURES = {
    ("fails", 1): "[rankNone]: as torch writes it",
    ("fails", 2): "rank 1: as torch writes it",
    ("silent", 2): "rank 1: it said nothing",
    ("killed", 1): "killed by signal 9",
    ("killed", 2): "rank 1: killed by signal 9",
}


def runs(pid: int) -> bool:
    """A process that nobody waits for is left as a zombie, which does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder: Path, ranks: int) -> list[int]:
    """Of the ranks and of what they have started, once all have written theirs."""
    until = time.monotonic() + 60
    while len(files := sorted(folder.glob("*.pids"))) < ranks:
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(pid) for file in files for pid in file.read_text().split()]


def none_runs(folder: Path, ranks: int, seconds: float = 10.0) -> bool:
    found, until = pids(folder, ranks), time.monotonic() + seconds
    while any(map(runs, found)) and time.monotonic() < until:
        time.sleep(0.02)
    return len(found) == 2 * ranks and not any(map(runs, found))


def work(name: str, folder: Path, ranks: int) -> Work:
    return Work(name, str(folder), steps=1, batch=1, ranks=ranks)


def test_ranks_get_the_variables_of_torchrun(tmp_path: Path) -> None:
    found = measured(sys.executable, SYSTEM, work("variables", tmp_path, 3), processes=3)
    assert isinstance(found, Times), found
    assert list(map(str, found.tokens)) == ["0", "0", "3", "3", "127.0.0.1", "1"]


def test_one_process_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may start ranks itself."""
    monkeypatch.delenv("RANK", raising=False)
    found = measured(sys.executable, SYSTEM, work("variables", tmp_path, 2))
    assert isinstance(found, Times) and list(map(str, found.tokens)) == ["", "", "", "", "", "1"], found


@pytest.mark.parametrize(("name", "ranks"), FAILURES)
def test_the_rank_that_failed_is_named_and_no_other_is_left(name: str, ranks: int, tmp_path: Path) -> None:
    found = measured(sys.executable, SYSTEM, work(name, tmp_path, ranks), processes=ranks, limit=60.0)
    assert isinstance(found, str) and found.splitlines()[-1] == FAILURES[name, ranks], found
    assert none_runs(tmp_path, ranks)


def test_ranks_that_hang_are_ended(tmp_path: Path) -> None:
    assert measured(sys.executable, SYSTEM, work("hangs", tmp_path, 2), 2, limit=5.0) == "it had not ended after 5 s"
    assert none_runs(tmp_path, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    """After Ctrl-C, also what they started. Where the benchmark is killed, nobody can end that."""
    code = f"from benchmarks.step_processes import *; measured({sys.executable!r}, {SYSTEM!r}, " \
        f"Work('hangs', {str(tmp_path)!r}, steps=1, batch=1, ranks=2), 2)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as benchmark:
        found = pids(tmp_path, 2)
        benchmark.send_signal(number)
    if number == signal.SIGINT:
        assert none_runs(tmp_path, 2)
        return
    until = time.monotonic() + 10
    while any(map(runs, found[::2])) and time.monotonic() < until:
        time.sleep(0.02)
    left = [pid for pid in found if runs(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not set(left) & set(found[::2])
