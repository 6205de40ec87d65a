"""The worker processes in which a rank calls users' Python functions.

In: rows and their names. Out: one number a row, in order, the same for any number of workers. Rows are cut into chunks
that workers take one after another. A chunk that takes longer than one row may, or whose worker dies, is called again
row by row in a fresh worker, so that the row is found that is to blame; when none is, the run goes on.
Invariant: no worker outlives the pool or the rank. Of several mistakes the one of the first row is told.
Codes, besides those of `runtime/reward.py`: RL0777 a row took too long, RL0778 a worker died.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from rldsl.diag import Diagnostic, Failure, fail
from rldsl.plan.model import Function
from rldsl.runtime import reward
from rldsl.runtime.reward import Row
from rldsl.runtime.worker import WHERE, encoded, receive, send

LIMIT = 60.0  # seconds a row
LOADING = 300.0  # seconds that files may take to be loaded: they may load models
SHARES, MOST = 4, 64  # chunks for each worker, so that none waits long for the others; rows of a chunk
LOAD = -1
TRIES = 3  # of starting a worker that dies before it gets a row
_BOOT = ("import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rldsl.runtime.worker import main; "
         "main(*map(int, sys.argv[2:]))")


class Chunk(NamedTuple):
    """Rows start .. stop of a call (start LOAD: the functions are loaded). again: a worker has died with it before."""

    start: int
    stop: int
    again: bool = False


@dataclass(eq=False)
class Worker:
    """One process. work: what it does now, until `deadline` at the latest."""

    number: int
    process: subprocess.Popen
    peer: socket.socket
    trace: int
    work: Chunk | None = None
    deadline: float = 0.0
    line: bytes = b""  # of its output, not yet ended

    @property
    def output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()


@dataclass
class Call:
    """What is known of one call of a function."""

    function: Function
    rows: list[Row]
    names: Sequence[str]
    todo: deque[Chunk]
    values: list[float]
    errors: dict[int, Failure] = field(default_factory=dict)  # by first row

    def waits(self) -> bool:
        """Whether a chunk waits for a worker; after a mistake only rows before it still matter."""
        return bool(self.todo) and self.todo[0].start < min(self.errors, default=len(self.rows))

    def next(self) -> Chunk | None:
        return self.todo.popleft() if self.waits() else None


class Pool:
    """Workers that have loaded `functions`. With 0 of them functions are called in this process, without a limit.

    To be made on the rank's main thread: workers end with the thread that started them."""

    def __init__(self, functions: Sequence[Function], workers: int = 0, limit: float = LIMIT, rank: int = 0,
                 loading: float = LOADING):
        """limit: seconds a row. loading: seconds for the files. rank: for what is printed. Raises what is wrong with
        the functions' files."""
        self.functions, self.limit, self.rank, self.loading = tuple(functions), limit, rank, loading
        self.slow: set[str] = set()  # functions that are called row by row from now on
        self.workers: list[Worker] = []
        self.lost = 0  # workers that died between calls, since the last answer
        if not workers:
            for function in self.functions:
                reward.load(function)
            return
        try:
            if self.functions:
                self.workers += (self._started(i) for i in range(workers))
            while any(w.work for w in self.workers):
                self._wait(None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Function, rows: list[Row], names: Sequence[str] = ()) -> list[float]:
        """The function's value for each row. names: what messages call the rows (default: their numbers)."""
        names = names or [str(i) for i in range(len(rows))]
        if not self.workers:
            return reward.call(function, json.loads(encoded(rows)), names)
        call = Call(function, rows, names, deque(self._chunks(function, len(rows))), [0.0] * len(rows))
        while True:
            for worker in list(self.workers):
                if worker.work is None and (chunk := call.next()) is not None:
                    self._give(worker, chunk, call)
            if not call.waits() and all(w.work is None or w.work.start == LOAD for w in self.workers):
                break
            self._wait(call)
        if call.errors:
            raise call.errors[min(call.errors)]
        return call.values

    def close(self) -> None:
        """End the workers: first by a word, then by force, with all that they have started."""
        for worker in self.workers:
            worker.peer.close()
        until = time.monotonic() + 1.0
        for worker in self.workers:
            while worker.work is None and not _ended(worker) and time.monotonic() < until:
                time.sleep(0.005)
            self._end(worker)
        self.workers.clear()

    def _chunks(self, function: Function, rows: int) -> Iterator[Chunk]:
        """Near equal parts of at least two rows: a function that returns one number for any rows must be found out."""
        if function.id in self.slow:
            return _singles(Chunk(0, rows))
        parts = max(-(-rows // MOST), min(rows // 2, SHARES * len(self.workers)), min(rows, 1))
        cuts = [rows * i // parts for i in range(parts + 1)] if parts else []
        return (Chunk(*ends) for ends in zip(cuts, cuts[1:]))

    # the life of a worker

    def _started(self, number: int) -> Worker:
        ours, theirs = socket.socketpair()
        trace, tracing = os.pipe()
        os.set_blocking(trace, False)
        numbers = (theirs.fileno(), tracing, os.getpid())
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, numbers)]
        # a session of its own: Ctrl-C and torchrun's signals are for the rank, which decides
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   pass_fds=(theirs.fileno(), tracing), start_new_session=True)
        theirs.close()
        os.close(tracing)
        worker = Worker(number, process, ours, trace, Chunk(LOAD, LOAD), time.monotonic() + self.loading)
        os.set_blocking(worker.output, False)
        ours.settimeout(self.loading)
        send(ours, encoded({"load": [asdict(f) for f in self.functions]}))
        return worker

    def _end(self, worker: Worker) -> int:
        """Kill the process and its descendants; what it has printed is told. The exit status, negative for a signal."""
        if not _ended(worker):
            os.kill(worker.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)  # its number stays taken until it is reaped
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._tell(worker, ended=True)
        status = worker.process.wait()
        worker.peer.close()
        os.close(worker.trace)
        assert worker.process.stdout is not None
        worker.process.stdout.close()
        return status

    def _give(self, worker: Worker, chunk: Chunk, call: Call) -> None:
        worker.work, worker.deadline = chunk, time.monotonic() + self.limit
        part = slice(chunk.start, chunk.stop)
        worker.peer.settimeout(self.limit)
        try:
            send(worker.peer, encoded({"function": call.function.id, "rows": call.rows[part],
                                       "names": list(call.names[part])}))
        except TimeoutError:
            self._late(worker, call)
        except ConnectionError:  # it has died before; no row is to blame, unless this happens again and again
            self.lost += 1
            if self.lost > TRIES * len(self.workers):
                return self._died(worker, call)
            call.todo.appendleft(chunk)
            self._replace(worker, call)

    # what workers say

    def _wait(self, call: Call | None) -> None:
        """Until a worker has answered or printed, or the first deadline has passed; then see to all of them."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                if worker.work is not None:
                    selector.register(worker.peer, selectors.EVENT_READ)
                    selector.register(worker.output, selectors.EVENT_READ)
            first = min(w.deadline for w in self.workers if w.work is not None)
            selector.select(max(0.0, first - time.monotonic()))
        for worker in list(self.workers):
            self._tell(worker)
            if worker.work is None:
                continue
            if _readable(worker.peer):
                self._hear(worker, call)
            elif worker.deadline < time.monotonic():
                self._late(worker, call)

    def _hear(self, worker: Worker, call: Call | None) -> None:
        worker.peer.settimeout(max(1.0, worker.deadline - time.monotonic()))
        try:
            answer = receive(worker.peer)
        except TimeoutError:
            return self._late(worker, call)
        if answer is None:
            return self._died(worker, call)
        self._tell(worker)
        chunk, worker.work = worker.work, None
        assert chunk is not None
        failure = Failure([Diagnostic(**{**answer["error"], "notes": tuple(answer["error"]["notes"])})]) \
            if "error" in answer else None
        if chunk.start == LOAD and failure is not None:
            raise failure
        if call is None or chunk.start == LOAD:
            return
        self.lost = 0
        if failure is not None:
            call.errors[chunk.start] = failure
        else:
            call.values[chunk.start : chunk.stop] = answer["values"]

    def _tell(self, worker: Worker, ended: bool = False) -> None:
        """What the worker has printed, on this process's stderr, line by line."""
        text = worker.line + _available(worker.output)
        *lines, worker.line = text.split(b"\n")
        if ended and worker.line:
            lines, worker.line = [*lines, worker.line], b""
        for line in lines:
            self._print(worker, line.decode("utf-8", "backslashreplace"))

    def _print(self, worker: Worker, text: str) -> None:
        print(f"rank {self.rank} worker {worker.number} | {text}", file=sys.stderr, flush=True)

    # what goes wrong

    def _late(self, worker: Worker, call: Call | None) -> None:
        os.kill(worker.process.pid, WHERE)
        time.sleep(0.1)  # time for the lines that it is at
        chunk, lines = worker.work, _available(worker.trace)
        assert chunk is not None
        self._replace(worker, call)
        if call is None or chunk.start == LOAD:
            raise self._blame("RL0777", f"took longer than {self.loading:g} s to load", lines, None, chunk,
                              help="do long work when the function is first called, or before the run")
        if chunk.stop - chunk.start > 1:
            self.slow.add(call.function.id)
            call.todo = deque(single for c in (chunk, *call.todo) for single in _singles(c, c.again))
            return
        call.errors[chunk.start] = self._blame(
            "RL0777", f"took longer than {self.limit:g} s for row {call.names[chunk.start]}", lines, call, chunk,
            help="give the function a limit of its own, or the rows more time with `--reward-timeout SECONDS`")

    def _died(self, worker: Worker, call: Call | None) -> None:
        chunk = worker.work
        assert chunk is not None
        _readable(worker.peer, 0.05)
        lines = _available(worker.trace)
        status = self._replace(worker, call)
        names = {s.value: s.name for s in signal.Signals}
        how = f"killed by {names.get(-status, -status)}" if status < 0 else f"exit status {status}"
        help = "the system kills processes that take too much memory" if status == -signal.SIGKILL else \
            "it must return, not end its process" if status >= 0 else "a library that it calls has crashed"
        if call is None or chunk.start == LOAD:
            raise self._blame("RL0778", f"ended its process while it was loaded ({how})", lines, None, chunk, help)
        if not chunk.again:
            self._print(worker, f"`{call.function.name}` ended this process ({how}); its rows are called again, one by "
                        "one")
            call.todo.extendleft(reversed(list(_singles(chunk, again=True))))
            return
        call.errors[chunk.start] = self._blame(
            "RL0778", f"ended its process on row {call.names[chunk.start]} ({how})", lines, call, chunk, help)

    def _replace(self, worker: Worker, call: Call | None) -> int:
        """End a worker and start another in its place. The exit status of the first."""
        status = self._end(worker)
        if call is None:  # the run has not begun, and will not
            self.workers.remove(worker)
        else:
            self.workers[self.workers.index(worker)] = self._started(worker.number)
        return status

    def _blame(self, code: str, what: str, lines: bytes, call: Call | None, chunk: Chunk, help: str) -> Failure:
        functions = [call.function] if call is not None else list(self.functions)
        function, line = _place(functions, lines.decode("utf-8", "replace"))
        subject = f"`{function.name}`" if call is not None else "this Python file"
        notes = reward.describe(call.rows[chunk.start], call.names[chunk.start])[1:] if call is not None else ()
        return fail(code, f"{subject} {what}", place=f"{function.path}:{line}" if line else function.path, notes=notes,
                    help=help)


def _place(functions: Sequence[Function], lines: str) -> tuple[Function, str]:
    """The innermost line of a user's file among those that a process was at; the first file without a line else."""
    for file, line in re.findall(r'File "(.*)", line (\d+) in', lines):
        for function in functions:
            if file == str(reward.located(function.path)):
                return function, line
    return functions[0], ""


def _singles(chunk: Chunk, again: bool = False) -> Iterator[Chunk]:
    return (Chunk(i, i + 1, again) for i in range(chunk.start, chunk.stop))


def _ended(worker: Worker) -> bool:
    return os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _available(descriptor: int) -> bytes:
    """All that can be read now."""
    parts = []
    try:
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def _readable(peer: socket.socket, seconds: float = 0.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        return bool(selector.select(seconds))
