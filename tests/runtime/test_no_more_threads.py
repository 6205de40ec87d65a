"""Where the system starts no more threads or processes, every command and every rank says so (RL0707), without a
traceback; what works without a thread works."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl import threads
from rldsl.cli import main
from rldsl.cli.status_line import StatusLine
from rldsl.diag import Failure
from rldsl.python import start
from rldsl.runtime.health.failure_messages import describe_own_error
from rldsl.runtime.metrics.run_lock import LOCK, acquire
from rldsl.search import parallel

STACK = 1 << 47  # bytes of each thread's stack: more than an address space has, so that no thread starts
REFUSED = RuntimeError("can't start new thread")


def limited(*line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python process that can start no thread."""
    limits = (STACK, resource.getrlimit(resource.RLIMIT_STACK)[1])
    if limits[1] not in (resource.RLIM_INFINITY, STACK) and limits[1] < STACK:
        pytest.skip("the stack is limited here")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
                                "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, *line], capture_output=True, text=True, timeout=100, cwd=cwd, env=environment,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, limits))


@pytest.fixture
def no_threads(tmp_path: Path) -> None:
    code = "import threading; threading.Thread(target=print).start()"
    if "can't start new thread" not in limited("-c", code, cwd=tmp_path).stderr:
        pytest.skip("a thread starts whatever its stack")


@pytest.mark.parametrize("line", [
    ("-m", "rldsl.runtime.launch", "--parent", "PID", "--standalone", "--nproc-per-node", "2", "-m", "rldsl.run", "p.plan"),
    ("-c", "import os; os.environ['TORCHELASTIC_RUN_ID'] = 'x'; from rldsl.run import main; main()", "p.plan")])
def test_launcher_and_ranks(no_threads: None, tmp_path: Path, line: tuple[str, ...]) -> None:
    done = limited(*(str(os.getpid()) if word == "PID" else word for word in line), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error[RL0707]: this process may start no more threads")
    assert "`ulimit -u`" in done.stderr and "Traceback" not in done.stderr


def test_a_command_that_needs_no_thread_works(no_threads: None, tmp_path: Path) -> None:
    done = limited("-m", "rldsl.cli", "explain", "RL0707", cwd=tmp_path)
    assert done.returncode == 0 and "ulimit -u" in done.stdout and done.stderr == "", done


# ------------------------------------------------------------------------------------------------------------ parts


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_status_line_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    stream = io.StringIO()
    with StatusLine(stream, drawn=True) as line:
        line.clear()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("error", [REFUSED, RuntimeError("Resource temporarily unavailable"), MemoryError()])
def test_a_thread_that_is_refused(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(Failure, match="RL0707 rank 3 may start no more threads") as caught:
        threads.start(threading.Thread(target=print), "rank 3")
    assert "ulimit" in caught.value.diagnostics[0].help


def test_a_thread_that_starts_and_one_that_is_started_twice() -> None:
    thread = threading.Thread(target=len, args=((),))
    threads.start(thread)
    thread.join()
    with pytest.raises(RuntimeError, match="can only be started once"):
        threads.start(thread)


def popen_fails(number: int) -> Callable[..., object]:
    def _execute_child(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return _execute_child


@pytest.mark.parametrize("number, refused", [(errno.EAGAIN, True), (errno.ENOMEM, True), (errno.ENOENT, False),
                                             (errno.EACCES, False)])
def test_a_process_that_is_refused(number: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", popen_fails(number))
    with pytest.raises(OSError) as caught:
        subprocess.run(["true"])
    assert threads.is_refused(caught.value) == refused


@pytest.mark.parametrize("error", [
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),  # of a socket: no process was to be started
    OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("connect: Resource temporarily unavailable"),
    RuntimeError("can't start new thread at interpreter shutdown"), ValueError("can't start new thread")])
def test_what_is_no_refusal(error: Exception) -> None:
    assert not threads.is_refused(error)
    assert [d.code for d in describe_own_error(error, 0, "event 3")] != ["RL0707"] or "memory" in str(error)


def test_what_a_rank_says_of_it() -> None:
    (found,) = describe_own_error(REFUSED, 2, "event 3")
    assert (found.code, found.place) == ("RL0707", "event 3") and found.title.startswith("rank 2 may start no more threads")


@pytest.mark.parametrize("as_json", [False, True])
def test_what_a_command_says_of_it(as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.commands.runs.listing", refuse)
    monkeypatch.setattr("rldsl.commands.runs.records", refuse)
    done = CliRunner().invoke(main, ["runs", str(tmp_path), *(["--json"] if as_json else [])])
    assert done.exit_code == 1 and "this command may start no more threads" in done.output
    assert "bug" not in done.output and "Traceback" not in done.output
    if as_json:
        assert json.loads(done.stdout)["diagnostics"][0]["code"] == "RL0707"


def test_a_bug_is_still_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise RuntimeError("cannot join thread before it is started")

    monkeypatch.setattr("rldsl.commands.runs.listing", bug)
    done = CliRunner().invoke(main, ["runs", str(tmp_path)])
    assert done.exit_code == 3 and "internal error" in done.output


@pytest.mark.parametrize("number, error", [(errno.EAGAIN, Failure), (errno.ENOENT, OSError)])
def test_the_start_of_a_launcher(number: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                 ) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", popen_fails(number))
    with pytest.raises(error, match="RL0707" if error is Failure else "No such file"):
        start.launch("x.plan", 1, str(tmp_path / "out"), [])


def test_ranks_that_did_start_end_with_one_that_did_not(tmp_path: Path) -> None:
    code = f"""
import errno, os, subprocess, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from rldsl.diag import Failure
from rldsl.runtime import local_ranks
real, started = subprocess.Popen._execute_child, []
def _execute_child(self, *given, **named):
    if started:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    real(self, *given, **named)
    started.append(self.pid)
subprocess.Popen._execute_child = _execute_child
try:
    local_ranks.run(2, "one_rank", ())
except Failure as failure:
    print(failure)
try:
    os.kill(started[0], 0)
except ProcessLookupError:
    print("gone")
"""
    (tmp_path / "one_rank.py").write_text("import time\ntime.sleep(600)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.splitlines() == ["RL0707 the launcher of 2 ranks may start no more threads or processes", "gone"], done


def test_a_lock_without_heartbeats_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limits:
        limits.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Failure, match="RL0707"):
            acquire(tmp_path / "out", "p.rlf")
    assert not list((tmp_path / "out").iterdir())
    with acquire(tmp_path / "out", "p.rlf"):
        assert (tmp_path / "out" / LOCK).exists()


def test_a_search_with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before there is a process that nobody would end."""
    class Job:
        number = 0

    class Block:
        def __init__(self, size: int) -> None:
            self.size = size

    class Problem:
        calls = (Job(),)

        def blocks(self, *_: object) -> tuple[Block, ...]:
            return Block(1), Block(2)

    class Table:
        problem = Problem()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Failure, match="RL0707 this command may start no more threads"):
        parallel.fill(Table(), 0, 2)  # type: ignore[arg-type]
    parallel.fill(Table(), 0, 1)  # type: ignore[arg-type]
