"""How a rank calls users' Python functions: rows are divided over worker processes, and a row that fails is found.

In: rows and their names. Out: one result per row, in order, the same for any number of workers. Rows are divided into
chunks that workers take one after another. A chunk that takes longer than one row may, or whose worker dies, is called
again row by row in a fresh worker, to find the row that fails; if none does, the run continues.
Invariant: of several errors, that of the first row is reported, whatever the number of workers and their chunks: rows
are given out in order, and all rows before an error are evaluated before it is reported.
Codes, besides those of `runtime/rewards/user_functions.py`: RL0777 a row took too long, RL0778 a worker died.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rldsl.diag import Failure, fail
from rldsl.plan.function import Function, Result
from rldsl.runtime.rewards import user_functions, worker_process
from rldsl.runtime.rewards.user_functions import Row
from rldsl.runtime.rewards.worker import decoded, encoded, failure_from
from rldsl.runtime.rewards.worker_process import LOAD, RowChunk, Worker

SECONDS_PER_ROW = 60.0  # default time limit of a function
SECONDS_TO_LOAD = 300.0  # time limit of importing the files: they may load models
CHUNKS_PER_WORKER = 4  # so that no worker waits long for the others
MAX_CHUNK_ROWS = 64
MAX_START_ATTEMPTS = 3  # per worker, if workers die before they get a row


@dataclass
class FunctionCall:
    """What is known of one call of a function."""

    function: Function                                        # which one
    rows: list[Row]                                           # of this rank, in order
    names: Sequence[str]                                      # what messages call the rows
    todo: list[RowChunk]                                      # chunks that no worker has taken, in the order of rows
    values: list[Result]                                      # the results so far, by row
    errors: dict[int, Failure] = field(default_factory=dict)  # first row of a chunk -> what went wrong in it

    def has_work(self) -> bool:
        """Whether a chunk waits for a worker; after an error only rows before it still matter."""
        return bool(self.todo) and self.todo[0].start < min(self.errors, default=len(self.rows))

    def take_chunk(self) -> RowChunk | None:
        """The next chunk for a worker; None if there is none."""
        return self.todo.pop(0) if self.has_work() else None

    def put_back(self, chunks: Iterable[RowChunk]) -> None:
        """Return chunks that are still to be done."""
        self.todo = sorted([*self.todo, *chunks])


class RewardPool:
    """Workers that have loaded `functions`. With 0 of them functions are called in this process, without a limit.

    Create it on the rank's main thread: workers end with the thread that started them."""

    def __init__(self, functions: Sequence[Function], workers: int = 0, limit: float = SECONDS_PER_ROW, rank: int = 0,
                 loading: float = SECONDS_TO_LOAD):
        """limit: seconds per row. loading: seconds for importing the files. rank: printed before each line of output.
        Raises a Failure if a file cannot be used."""
        self.functions, self.limit, self.loading = tuple(functions), limit, loading
        self.row_by_row: set[str] = set()  # functions that are called row by row from now on
        self.workers: list[Worker] = []
        self.num_lost = 0  # workers that died between calls, since the last answer
        if not workers:
            for function in self.functions:
                user_functions.loaded(function)
            return
        try:
            if self.functions:
                self.workers += (self._start_worker(f"rank {rank} worker {i}") for i in range(workers))
            while any(w.work for w in self.workers):
                self._wait(None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Function, rows: list[Row], names: Sequence[str] = ()) -> list[Result]:
        """The function's result for each row. names: what messages call the rows (default: their numbers)."""
        names = names or [str(i) for i in range(len(rows))]
        if not self.workers:
            return user_functions.call(function, decoded(encoded(rows)), names)
        call = FunctionCall(function, rows, names, self._chunks(function, len(rows)), [0.0] * len(rows))
        while True:
            for worker in list(self.workers):
                if worker.work is None and (chunk := call.take_chunk()) is not None:
                    self._assign(worker, chunk, call)
            if not call.has_work() and all(w.work in (None, LOAD) for w in self.workers):
                break
            self._wait(call)
        if call.errors:
            raise call.errors[min(call.errors)]
        return call.values

    def close(self) -> None:
        """End the workers, with all that they have started."""
        worker_process.end(self.workers)
        self.workers.clear()

    def _chunks(self, function: Function, rows: int) -> list[RowChunk]:
        """Chunks of nearly equal size, of at least two rows: with one row per call it would go unnoticed that a
        function returns a single number however many rows it gets."""
        if function.id in self.row_by_row:
            return RowChunk(0, rows).singles()
        parts = max(-(-rows // MAX_CHUNK_ROWS), min(rows // 2, CHUNKS_PER_WORKER * len(self.workers)), min(rows, 1))
        cuts = [rows * i // parts for i in range(parts + 1)] if parts else []
        return [RowChunk(*ends) for ends in pairwise(cuts)]

    def _start_worker(self, name: str) -> Worker:
        return worker_process.start(name, self.functions, self.loading)

    def _assign(self, worker: Worker, chunk: RowChunk, call: FunctionCall) -> None:
        part = slice(chunk.start, chunk.stop)
        request = {"function": call.function.id, "rows": call.rows[part], "names": list(call.names[part])}
        try:
            worker.send_request(chunk, request, self.limit)
        except TimeoutError:
            self._handle_timeout(worker, call)
        except ConnectionError:
            # it died before it got the rows: they are not to blame, unless this happens again and again
            self.num_lost += 1
            if self.num_lost > MAX_START_ATTEMPTS * len(self.workers):
                return self._handle_death(worker, call)
            call.put_back([chunk])
            self._replace(worker, call)

    def _wait(self, call: FunctionCall | None) -> None:
        """Wait until a worker needs attention; then handle all that do."""
        worker_process.wait(self.workers)
        for worker in list(self.workers):
            worker.print_output()
            if worker.work is None:
                continue
            if worker.has_answer():
                self._handle_answer(worker, call)
            elif worker.deadline < time.monotonic():
                self._handle_timeout(worker, call)

    def _handle_answer(self, worker: Worker, call: FunctionCall | None) -> None:
        try:
            answer = worker.receive_answer()
        except TimeoutError:
            self._handle_timeout(worker, call)
            return
        if answer is None:
            self._handle_death(worker, call)
            return
        worker.print_output()
        chunk, worker.work = worker.working_on(), None
        failure = failure_from(answer["error"]) if "error" in answer else None
        if chunk == LOAD and failure is not None:
            raise failure
        if call is None or chunk == LOAD:
            return
        self.num_lost = 0
        if failure is not None:
            call.errors[chunk.start] = failure
        else:
            call.values[chunk.start : chunk.stop] = answer["values"]

    # errors

    def _handle_timeout(self, worker: Worker, call: FunctionCall | None) -> None:
        chunk, lines = worker.working_on(), worker.request_stack()
        self._replace(worker, call)
        if call is None or chunk == LOAD:
            raise self._failure("RL0777", f"took more than {self.loading:g} s to import", lines, None, chunk,
                              help="do expensive work in the first call of the function, or before the run")
        if chunk.stop - chunk.start > 1:
            self.row_by_row.add(call.function.id)
            call.todo = [single for c in call.todo for single in c.singles(c.again)]
            call.put_back(chunk.singles(chunk.again))
            return
        call.errors[chunk.start] = self._failure(
            "RL0777", f"took more than {self.limit:g} s for row {call.names[chunk.start]}", lines, call, chunk,
            help="add a time limit inside the function, or raise `--reward-timeout SECONDS`")

    def _handle_death(self, worker: Worker, call: FunctionCall | None) -> None:
        chunk, lines = worker.working_on(), worker.crash_stack()
        status = self._replace(worker, call)
        names = {s.value: s.name for s in signal.Signals}
        how = f"killed by {names.get(-status, -status)}" if status < 0 else f"exit status {status}"
        help = "the system kills processes that use too much memory" if status == -signal.SIGKILL else \
            "the function must return instead of exiting" if status >= 0 else "a library that it uses crashed"
        if call is None or chunk == LOAD:
            raise self._failure("RL0778", f"ended its process during import ({how})", lines, None, chunk, help)
        if not chunk.again:
            worker.print_line(f"`{call.function.name}` ended this process ({how}); retrying its rows one by one")
            call.put_back(chunk.singles(again=True))
            return
        call.errors[chunk.start] = self._failure(
            "RL0778", f"ended its process on row {call.names[chunk.start]} ({how})", lines, call, chunk, help)

    def _replace(self, worker: Worker, call: FunctionCall | None) -> int:
        """End a worker and start another in its place. Returns the exit status of the first."""
        status = worker.end()
        if call is None:  # the run has not begun, and will not
            self.workers.remove(worker)
        else:
            self.workers[self.workers.index(worker)] = self._start_worker(worker.name)
        return status

    def _failure(self, code: str, what: str, lines: str, call: FunctionCall | None, chunk: RowChunk,
               help: str) -> Failure:
        functions = [call.function] if call is not None else list(self.functions)
        function, line = _innermost_line(functions, lines)
        subject = f"`{function.name}`" if call is not None else "this Python file"
        notes = user_functions.describe(call.rows[chunk.start], call.names[chunk.start])[1:] if call is not None else ()
        return fail(code, f"{subject} {what}", place=f"{function.path}:{line}" if line else function.path, notes=notes,
                    help=help)


def _innermost_line(functions: Sequence[Function], lines: str) -> tuple[Function, str]:
    """(function, line): the innermost line of a user's file in a stack trace; the first function and "" if there is
    none."""
    for file, line in re.findall(r'File "(.*)", line (\d+) in', lines):
        for function in functions:
            if file == str(user_functions.function_path(function.path)):
                return function, line
    return functions[0], ""
