"""torchrun prints its own report after everything that ranks print. It ends with our message."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rldsl.runtime.health import failure_messages
from rldsl.runtime.health.failure_messages import tell_torchrun

CAUSE = "error[RL0709]: rank 1 exited without an error message"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(found))
    return found


def last_of_report(*ranks: tuple[int, str]) -> str:
    """What torchrun says last. ranks: exit code and error file of each, as torchrun notices them."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=file)
                for rank, (code, file) in enumerate(ranks)}
    return str(ChildFailedError("rldsl.run", failures)).partition("Root Cause")[2]


def test_what_a_killed_rank_leads_to_is_told_after_the_signal(file: Path) -> None:
    """torchrun has noticed the killed rank before the other one knows what to say of it."""
    tell_torchrun(CAUSE, known=time.time() + 2)
    last = last_of_report((-signal.SIGKILL, ""), (1, str(file)))
    assert CAUSE in last and "Signal 9" not in last


def test_a_rank_that_ends_without_a_message_is_not_the_last_word(file: Path) -> None:
    tell_torchrun(CAUSE)
    last = last_of_report((1, ""), (1, str(file)))
    assert CAUSE in last and "To enable traceback" not in last


def test_ranks_that_stop_because_of_another_do_not_come_before_it(file: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    tell_torchrun(CAUSE)
    other = tmp_path / "other.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(other))
    tell_torchrun("stopped: rank 1 failed at event 3", is_cause=False)
    assert CAUSE in last_of_report((1, str(other)), (1, str(file)))
    assert "stopped: rank 1" in last_of_report((1, str(other)))  # on a machine where no rank knows the cause


def test_a_failure_long_before_stays_the_cause(file: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"message": "the first", "timestamp": int(time.time()) - 100}))
    tell_torchrun(CAUSE)
    assert "the first" in last_of_report((1, str(before)), (1, str(file)))


def test_without_torchrun_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    tell_torchrun(CAUSE)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none/error.json"))
    tell_torchrun(CAUSE)
    assert not list(tmp_path.iterdir())


RANK = """
import os, signal, sys, time
from rldsl.runtime.health.failure_messages import tell_torchrun
def told(*_):
    known = time.time()
    time.sleep(2)  # finding out which rank is gone
    tell_torchrun("CAUSE", known=known)
    os._exit(1)
signal.signal(signal.SIGTERM, told)
if os.environ["RANK"] == "1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.thorough
def test_torchrun_itself(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK.replace("CAUSE", CAUSE))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "rank.py")],
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and failure_messages.NOTICED > 2
    assert done.stderr.rstrip().rstrip("=").rstrip().endswith(CAUSE), done.stderr
