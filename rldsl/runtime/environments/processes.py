"""Conversations with environments that run in processes of their own, one live conversation per process.

In: an environment's Function, how its conversations become tokens (`chat.py`), and limits. Out: an implementation of
`Conversations`.
Invariant: nothing here waits longer than `turn_timeout`, and what one conversation does to its process, memory, output
or arguments reaches no other one. An error names file, line, row and turn; with `on_error="end"` it ends the
conversation and is printed.
Codes, besides those of `contract.py`, `fork_server.py` and `chat.py`: RL0716 it took too long, RL0717 its process ended
or printed without end.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rldsl.diag import Failure, fail, internal_error
from rldsl.plan.function import Function
from rldsl.runtime.environments import Arrival, Message, OnError, ResetParameters, Stopped
from rldsl.runtime.environments.contract import Speaks
from rldsl.runtime.environments.forked_worker import ForkedWorker, ForkServer, start_server
from rldsl.runtime.environments.tool_calls import Turn
from rldsl.runtime.rewards import user_functions
from rldsl.runtime.rewards.pool import SECONDS_TO_LOAD
from rldsl.runtime.rewards.worker import failure_from
from rldsl.runtime.rewards.worker_process import RowChunk

SECONDS_TO_END = 1.0      # that a process has after its conversation
LARGEST_OUTPUT = 1 << 22  # bytes that an environment may print in a turn


class Chat(Protocol):
    """How a conversation becomes tokens (`rldsl.runtime.environments.chat`)."""

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The first context."""

    def reply(self, messages: Sequence[Message], cut: bool) -> tuple[int, ...]:
        """The context that these new messages add after a turn of the model. cut: the turn has no stop token."""

    def turn(self, ids: Sequence[int], context: Sequence[int]) -> Turn:
        """What the model said. context: the tokens before it, as `first` or `reply` returned them."""


class ChatFactory(Protocol):
    """Makes a Chat once it is known what the environment says. A Failure if the tokenizer cannot be used for it."""

    def __call__(self, tools: Sequence[Mapping[str, Any]], speaks: Speaks) -> Chat:
        """tools: JSON schemas; speaks: the role of the environment's messages."""


@dataclass
class Row:
    """A conversation that is alive."""

    worker: ForkedWorker               # its process
    messages: list[Message]            # the prompt, without what the environment appends
    columns: Mapping[str, object]      # of its data, for messages
    turn: int = 0                      # turns of the model so far
    context: tuple[int, ...] = ()      # tokens of the last arrival
    cut: bool = False                  # whether the model's last turn has no stop token
    why: Stopped | None = None         # why it ends, if the reward is under way
    printed: int = 0                   # bytes of output at the beginning of this turn


@dataclass
class EnvironmentProcesses:
    """The conversations of a rank with one environment. Create it on the rank's main thread: its processes end with
    the thread that started them. The row of a Failure is free again; the others live on."""

    function: Function                              # the environment's class
    turn_timeout: float                             # seconds for each of `reset`, the answer to a turn, the reward
    on_error: OnError = "stop"                      # what an error of an environment does
    rank: int = 0                                   # printed before each line of output
    loading: float = SECONDS_TO_LOAD                # seconds for importing the file
    rows: dict[int, Row] = field(default_factory=dict, init=False)
    ready: list[Arrival] = field(default_factory=list, init=False)             # not yet asked for
    ending: list[tuple[float, ForkedWorker]] = field(default_factory=list, init=False)  # (deadline, process)
    server: ForkServer | None = field(default=None, init=False)
    chat: Chat | None = field(default=None, init=False)
    speaks: Speaks = field(default="tool", init=False)                         # role of the environment's messages
    takes: ResetParameters = field(default=ResetParameters(), init=False)      # the columns that `reset` takes

    def open(self, make_chat: ChatFactory) -> EnvironmentProcesses:
        """Import the file, create one environment to learn its tools, and check the chat template. A Failure if one of
        these is impossible."""
        try:
            self.server = start_server(f"rank {self.rank} environment", self.function, self.loading)
        except TimeoutError:
            raise self._at("RL0716", f"took more than {self.loading:g} s to import", "",
                           help="do expensive work in `reset`, or before the run") from None
        except ConnectionError:
            raise self._at("RL0717", "ended its process during import", "",
                           help="a library that it uses crashed, or it calls `exit`") from None
        try:
            self.chat = make_chat(*self._described())
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> EnvironmentProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, row: int, columns: Mapping[str, object], messages: object, seed: int) -> None:
        if row in self.rows:
            raise internal_error(f"the conversation of row {row} has begun already", "run")
        prompt = _as_messages(messages)
        worker = self._server().fork(f"rank {self.rank} environment {row}")
        self.rows[row] = Row(worker, prompt, columns)
        self._ask(row, {"begin": {"messages": prompt, "columns": columns, "seed": seed}})

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float] = ()) -> None:
        state = self._idle(row)
        state.turn += 1
        state.cut = ended_by_limit
        turn = self._chat().turn(ids, state.context)
        if self.speaks == "tool" and (not turn.calls or ended_by_limit and any("error" in c for c in turn.calls)):
            state.why = "max_new_tokens" if ended_by_limit else "no_call"
            self._ask(row, {"reward": True})
        else:
            self._ask(row, {"answer": {"content": turn.content, "calls": list(turn.calls)}})

    def finish(self, row: int, why: Stopped) -> None:
        self._idle(row).why = why
        self._ask(row, {"reward": True})

    def arrivals(self, wait: bool) -> list[Arrival]:
        if wait and not self.ready and not self._busy():
            raise internal_error("no conversation waits for its environment", "run")
        self._look(0.0)
        while wait and not self.ready:
            self._look(max(0.0, min(w.deadline for _, w in self._busy()) - time.monotonic()))
        arrived, self.ready = self.ready, []
        return arrived

    def close(self) -> None:
        """End all processes. It may be called again."""
        for worker in [row.worker for row in self.rows.values()] + [worker for _, worker in self.ending]:
            worker.end()
        self.rows.clear()
        self.ending.clear()
        if self.server is not None:
            self.server.close()
            self.server = None

    # requests and answers

    def _described(self) -> tuple[list[dict[str, Any]], Speaks]:
        worker = self._server().fork(f"rank {self.rank} environment")
        self.rows[-1] = Row(worker, [], {})
        try:
            worker.send_request(RowChunk(-1, 0), {"describe": True}, self.loading)
            while not worker.has_answer() and time.monotonic() < worker.deadline:
                self._wait_for([worker], worker.deadline - time.monotonic())
                worker.print_output()
            answer = self._answer_of(-1, self.loading)
        finally:
            self._release(-1)
        self.speaks, takes = answer["speaks"], answer["takes"]
        self.takes = ResetParameters(tuple(takes["required"]),
                                     None if takes["accepted"] is None else tuple(takes["accepted"]))
        return answer["tools"], self.speaks

    def _ask(self, row: int, request: dict[str, Any]) -> None:
        state = self.rows[row]
        state.printed = state.worker.num_printed
        try:
            state.worker.send_request(RowChunk(row, row + 1), request, self.turn_timeout)
        except (ConnectionError, TimeoutError):
            state.worker.deadline = time.monotonic()  # the next look finds out why

    def _busy(self) -> list[tuple[int, ForkedWorker]]:
        return [(row, state.worker) for row, state in self.rows.items() if state.worker.work is not None]

    def _look(self, seconds: float) -> None:
        """Wait until an environment needs attention, and handle all that do."""
        self._wait_for([worker for _, worker in self._busy()], seconds)
        for row, worker in self._busy():
            worker.print_output()
            state = self.rows[row]
            late = worker.deadline < time.monotonic()
            if not (worker.has_answer() or late or worker.num_printed - state.printed > LARGEST_OUTPUT):
                continue
            try:
                answer = self._answer_of(row, self.turn_timeout)
                arrival = self._arrival(row, answer)
            except Failure as failure:
                arrival = self._failed(row, failure)
            if arrival.ended:
                self._release(row)
            else:
                state.context = arrival.tokens
            self.ready.append(arrival)
        self._reap()

    def _answer_of(self, row: int, seconds: float) -> dict[str, Any]:
        """What has arrived from a process. A Failure if it is an error, or if nothing will arrive."""
        worker = self.rows[row].worker
        if worker.num_printed - self.rows[row].printed > LARGEST_OUTPUT:
            lines = worker.request_stack()
            worker.end()
            raise self._at("RL0717", f"printed more than {LARGEST_OUTPUT >> 20} MiB in one turn", lines, row,
                           help="print less: all output is shown on the run's own")
        try:
            if not worker.has_answer():
                raise TimeoutError
            answer = worker.receive_answer()
        except TimeoutError:
            lines = worker.request_stack()
            worker.end()
            raise self._at("RL0716", f"took more than {seconds:g} s to answer", lines, row,
                           help="add a time limit inside the environment, raise `turn_timeout=`, or end such "
                                "conversations with `on_error=end`") from None
        worker.print_output()
        worker.work = None
        if answer is None:
            lines, status = worker.crash_stack(), worker.end()
            names = {s.value: s.name for s in signal.Signals}
            how = f"killed by {names.get(-status, -status)}" if status < 0 else f"exit status {status}"
            raise self._at("RL0717", f"ended its process ({how})", lines, row,
                           help="the system kills processes that use too much memory" if status == -signal.SIGKILL else
                           "an environment must not exit" if status >= 0 else "a library that it uses crashed")
        if "error" in answer:
            (diagnostic,) = failure_from(answer["error"]).diagnostics
            raise Failure([replace(diagnostic, notes=(*diagnostic.notes, *self._notes(row)))])
        return dict(answer)

    def _arrival(self, row: int, answer: dict[str, Any]) -> Arrival:
        state, chat = self.rows[row], self._chat()
        if state.why is not None:
            return Arrival(row, (), True, state.why, answer["reward"], None)
        if answer.get("done"):
            return Arrival(row, (), True, "done", answer["reward"], answer["turn_reward"])
        tokens = chat.reply(answer["messages"], state.cut) if state.turn else chat.first(answer["messages"])
        return Arrival(row, tokens, False, None, None, answer.get("turn_reward"))

    def _failed(self, row: int, failure: Failure) -> Arrival:
        if self.on_error == "stop":
            self._release(row)
            raise failure
        (diagnostic,) = failure.diagnostics
        print(f"{diagnostic.place}: {diagnostic.code} {diagnostic.title}; {'; '.join(self._notes(row)[:1])}: its "
              "conversation ends (on_error=end)", file=sys.stderr, flush=True)
        state = self.rows[row]
        tokens = () if state.turn or state.context else self._chat().first(state.messages)
        return Arrival(row, tokens, True, "timeout" if diagnostic.code == "RL0716" else "error", None, None)

    # processes

    def _wait_for(self, workers: Sequence[ForkedWorker], seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                if worker.peer.fileno() >= 0:
                    selector.register(worker.peer, selectors.EVENT_READ)
                    selector.register(worker.output, selectors.EVENT_READ)
            selector.select(max(0.0, seconds))

    def _release(self, row: int) -> None:
        """Let the process of a conversation end."""
        worker = self.rows.pop(row).worker
        if worker.peer.fileno() >= 0:
            worker.peer.close()  # it closes its environment and ends
            self.ending.append((time.monotonic() + SECONDS_TO_END, worker))

    def _reap(self) -> None:
        left = []
        for deadline, worker in self.ending:
            if worker.ended or deadline < time.monotonic():
                worker.end()
            else:
                worker.print_output()
                left.append((deadline, worker))
        self.ending = left

    # errors

    def _at(self, code: str, what: str, lines: str, row: int | None = None, help: str = "") -> Failure:
        """A failure at the innermost line of the user's files that a stack trace has."""
        place = self.function.path
        paths = {str(user_functions.function_path(p)): p for p in (
            self.function.path, *(path for _, path, _ in self.function.modules))}
        for file, line in re.findall(r'File "(.*)", line (\d+) in', lines):
            if os.path.realpath(file) in paths:
                place = f"{paths[os.path.realpath(file)]}:{line}"
                break
        return fail(code, f"`{self.function.name}` {what}", place=place,
                    notes=self._notes(row) if row is not None else (), help=help)

    def _notes(self, row: int) -> tuple[str, ...]:
        if row < 0:
            return ("when it was created, before the first conversation",)
        state = self.rows[row]
        last = state.messages[-1]["content"] if state.messages else ""
        where = "in `reset`" if not state.turn and not state.context else f"turn {state.turn}"
        name, *prompt = user_functions.describe({"prompt": last}, str(row))
        return f"{name}, {where}", *prompt

    def _idle(self, row: int) -> Row:
        state = self.rows.get(row)
        if state is None or state.worker.work is not None:
            raise internal_error(f"row {row} has no conversation that waits for the model", "run")
        return state

    def _server(self) -> ForkServer:
        if self.server is None:
            raise internal_error("the environments of this rank are not open", "run")
        return self.server

    def _chat(self) -> Chat:
        if self.chat is None:
            raise internal_error("the environments of this rank are not open", "run")
        return self.chat


def _as_messages(prompt: object) -> list[Message]:
    """The prompt of a row as messages. Arrow gives every message all fields that any message has."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)):
        return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in prompt]
    return [{"role": "user", "content": str(prompt or "")}]
