"""A worker process as its rank sees it: started, sent requests, and ended with all processes that it has started.

In: the functions to load, then requests. Out: answers, and what the process prints, line by line on this process's
stderr, each line up to `LONGEST_LINE` bytes. The other side is `runtime/rewards/worker.py`.
Invariant: no worker outlives its rank, and nothing here waits longer than its time limit.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any, NamedTuple, Protocol, cast

from rldsl.diag import present
from rldsl.plan.function import Function
from rldsl.runtime.rewards.worker import STACK_SIGNAL, encoded, receive, send

# `__spec__` names what multiprocessing runs first in processes that users' code spawns
_BOOT = ("import json, sys; from importlib.machinery import ModuleSpec; sys.path[:] = json.loads(sys.argv[1]); "
         "__spec__ = ModuleSpec('rldsl.runtime.rewards.spawned_modules', None); "
         "from {} import main; main(*map(int, sys.argv[2:]))")
MAIN = "rldsl.runtime.rewards.worker"

SECONDS_TO_TRACE = 2.0  # that a worker on a busy machine may take to begin its stack trace
LONGEST_LINE = 1 << 21  # bytes that are kept of one line of output; it may never end
LARGEST_READ = 1 << 20  # bytes of output that are read at once: more than the system keeps of a process that ended


class Process(Protocol):
    """What a Worker needs of its process."""

    pid: int  # its number
    stdout: IO[bytes] | None  # the pipe for its output


class RowChunk(NamedTuple):
    """Rows start .. stop of a call."""

    start: int           # the first row
    stop: int            # the row after the last one
    again: bool = False  # whether a worker has died with it before

    def singles(self, again: bool = False) -> list[RowChunk]:
        """The same, row by row."""
        return [RowChunk(i, i + 1, again) for i in range(self.start, self.stop)]


LOAD = RowChunk(-1, -1)  # no rows: the functions are loaded


@dataclass(eq=False)
class Worker:
    """One process."""

    name: str                                           # printed in front of its output
    process: Process                                    # the interpreter that runs `worker.py`
    peer: socket.socket                                 # this rank's end of the socket for requests and answers
    trace: int                                          # descriptor on which it writes its stack trace when asked
    work: RowChunk | None = None                        # what it does now, until `deadline`
    deadline: float = 0.0                               # on the clock of time.monotonic
    line: bytearray = field(default_factory=bytearray)  # the line of output that has not ended yet
    omitted: int = 0                                    # bytes of that line that were not kept
    num_printed: int = 0                                # bytes of output so far

    @property
    def output(self) -> int:
        """The descriptor on which its output comes."""
        return self._stdout().fileno()

    def _stdout(self) -> IO[bytes]:
        return present(self.process.stdout, f"pipe for the output of {self.name}", place="run")

    def working_on(self) -> RowChunk:
        """What it does now. InternalError if it does nothing: only a worker that was asked is heard or given up."""
        return present(self.work, f"work of {self.name}", place="run")

    @property
    def ended(self) -> bool:
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def send_request(self, work: RowChunk, request: Any, seconds: float) -> None:
        """Send a request, to be answered within `seconds`. Errors: TimeoutError if the worker does not take it,
        ConnectionError if it has died."""
        self.work, self.deadline = work, time.monotonic() + seconds
        self.peer.settimeout(seconds)
        send(self.peer, encoded(request))

    def has_answer(self) -> bool:
        """Whether there is something to receive: an answer, or the end of the process."""
        return _readable(self.peer)

    def receive_answer(self) -> Any:
        """Its answer; None if it has died. Errors: TimeoutError if the rest of an answer does not arrive."""
        self.peer.settimeout(max(1.0, self.deadline - time.monotonic()))
        return receive(self.peer)

    def print_output(self, ended: bool = False) -> None:
        """Print the lines that it has printed. ended: the process has, so print an unfinished line too."""
        read = _available(self.output)
        self.num_printed += len(read)
        *lines, rest = read.split(b"\n")
        for line in lines:
            self._keep(line)
            self._end_line()
        self._keep(rest)
        if ended and self.line:
            self._end_line()

    def _keep(self, part: bytes) -> None:
        kept = part[: LONGEST_LINE - len(self.line)]
        self.line += kept
        self.omitted += len(part) - len(kept)

    def _end_line(self) -> None:
        more = f" ... ({self.omitted:,} more bytes omitted)" if self.omitted else ""
        self.print_line(self.line.decode("utf-8", "backslashreplace") + more)
        self.line.clear()
        self.omitted = 0

    def print_line(self, text: str) -> None:
        """Print a line under the name of the worker."""
        print(f"{self.name} | {text}", file=sys.stderr, flush=True)

    def request_stack(self) -> str:
        """The stack trace of where it is now, as text."""
        self._send_signal(STACK_SIGNAL)
        _readable(self.trace, SECONDS_TO_TRACE)
        time.sleep(0.1)  # until it has written all of it
        return _available(self.trace).decode("utf-8", "replace")

    def crash_stack(self) -> str:
        """The stack trace of where it crashed, as text; "" if it left none."""
        _readable(self.peer, 0.05)
        return _available(self.trace).decode("utf-8", "replace")

    def end(self) -> int:
        """Kill the process and its descendants, and print its last lines. Returns the exit status, negative for a
        signal."""
        status = self._kill()
        self.print_output(ended=True)
        self.peer.close()
        os.close(self.trace)
        self._stdout().close()
        return status

    def _send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def _kill(self) -> int:
        """Kill the process and its descendants. Returns the exit status, negative for a signal."""
        status = kill_group(self.process.pid)
        cast("subprocess.Popen[bytes]", self.process).returncode = status  # it has been reaped
        return status


def kill_group(pid: int) -> int:
    """Kill a child of this process and its descendants in the same session. Returns the exit status, negative for a
    signal."""
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its number stays taken until it is reaped
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start(name: str, functions: Sequence[Function], loading: float, main: str = MAIN) -> Worker:
    """Start a process that loads the functions. loading: time limit, in seconds. main: the module whose `main` it runs.
    It ends with the thread that started it."""
    ours, theirs = socket.socketpair()
    trace, tracing = os.pipe()
    os.set_blocking(trace, False)
    numbers = (theirs.fileno(), tracing, os.getpid())
    command = [sys.executable, "-c", _BOOT.format(main), json.dumps(sys.path), *map(str, numbers)]
    # a new session: Ctrl-C and torchrun's signals are for the rank, which decides
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               pass_fds=(theirs.fileno(), tracing), start_new_session=True)
    theirs.close()
    os.close(tracing)
    worker = Worker(name, process, ours, trace)
    os.set_blocking(worker.output, False)
    with suppress(ConnectionError):  # it has died already, which the next receive_answer finds
        worker.send_request(LOAD, {"load": [asdict(f) for f in functions]}, loading)
    return worker


def wait(workers: Iterable[Worker]) -> None:
    """Wait until a busy worker has answered or printed, or the first deadline has passed."""
    busy = [worker for worker in workers if worker.work is not None]
    with selectors.DefaultSelector() as selector:
        for worker in busy:
            selector.register(worker.peer, selectors.EVENT_READ)
            selector.register(worker.output, selectors.EVENT_READ)
        selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))


def end(workers: Sequence[Worker], seconds: float = 1.0) -> None:
    """End workers: idle ones end when their socket is closed, and all are killed after `seconds`."""
    for worker in workers:
        worker.peer.close()
    until = time.monotonic() + seconds
    for worker in workers:
        while worker.work is None and not worker.ended and time.monotonic() < until:
            time.sleep(0.005)
        worker.end()


def _available(descriptor: int) -> bytes:
    """What can be read now, up to `LARGEST_READ` bytes: a process that prints without end must not hold its rank."""
    read = bytearray()
    try:
        while len(read) < LARGEST_READ and (part := os.read(descriptor, 1 << 16)):
            read += part
    except BlockingIOError:
        pass
    return bytes(read)


def _readable(peer: socket.socket | int, seconds: float = 0.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        return bool(selector.select(seconds))
