"""Conversations with environments that run in separate processes, one live conversation per process.

In: an environment's Function, how its conversations become tokens (`chat.py`), and limits. Out: an implementation of
`Conversations`. An environment is asked what it says to each turn; an agent is asked once, to run, and asks the model
itself (`endpoint.py`).
Invariant: nothing here waits longer than `turn_timeout`, and what one conversation does to its process, memory, output
or arguments reaches no other one. An error names file, line, row and turn; with `on_error="end"` it ends the
conversation and is printed.
Codes, besides those of `contract.py`, `fork_server.py` and `chat.py`: RL0716 it took too long, RL0717 its process ended
or printed without end, RL0739 an agent that has not asked the model.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rldsl.diag import Failure, fail, internal_error, present
from rldsl.plan.function import Function
from rldsl.runtime.environments import Arrival, ContextImages, Message, OnError, ResetParameters, Stopped
from rldsl.runtime.environments.agent_branches import Heard
from rldsl.runtime.environments.chat import Chat, ChatFactory
from rldsl.runtime.environments.contract import Speaks
from rldsl.runtime.environments.conversation_errors import ended, half_character, in_conversation, innermost_place
from rldsl.runtime.environments.endpoint import Endpoint
from rldsl.runtime.environments.forked_worker import ForkedWorker, ForkServer, start_server
from rldsl.runtime.environments.requests import Refused, Rules
from rldsl.runtime.environments.tool_calls import whole
from rldsl.runtime.rewards.pool import SECONDS_TO_LOAD
from rldsl.runtime.rewards.worker import failure_from
from rldsl.runtime.rewards.worker_process import RowChunk

SECONDS_TO_END = 1.0      # that a process has after its conversation
LARGEST_OUTPUT = 1 << 22  # bytes that an environment may print in a turn


@dataclass
class Row:
    """A conversation that is alive."""

    worker: ForkedWorker               # its process
    messages: list[Message]            # the prompt, without what the environment appends
    columns: Mapping[str, object]      # of its data, for messages
    images: ContextImages | None = None    # of its data, if that has images
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
    rules: Rules | None = None                      # for the requests of an agent
    at: str = ""                                    # the call's place in the program, "p.rlf:7:3", for what is printed
    loading: float = SECONDS_TO_LOAD                # seconds for importing the file
    rows: dict[int, Row] = field(default_factory=dict, init=False)
    ready: list[Arrival] = field(default_factory=list, init=False)             # not yet asked for
    ending: list[tuple[float, ForkedWorker]] = field(default_factory=list, init=False)  # (deadline, process)
    server: ForkServer | None = field(default=None, init=False)
    chat: Chat | None = field(default=None, init=False)
    endpoint: Endpoint | None = field(default=None, init=False)                # of agents
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
            answer = self._described()
            if "agent" in answer:
                self.chat = make_chat([], None)
                self.endpoint = Endpoint(make_chat, present(self.rules, "rules for requests", place="run"))
            else:
                self.speaks, takes = answer["speaks"], answer["takes"]
                self.takes = ResetParameters(tuple(takes["required"]),
                                             None if takes["accepted"] is None else tuple(takes["accepted"]))
                self.chat = make_chat(answer["tools"], self.speaks)
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> EnvironmentProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, row: int, columns: Mapping[str, object], messages: object, seed: int,
              images: ContextImages | None = None) -> None:
        if row in self.rows:
            raise internal_error(f"the conversation of row {row} has begun already", "run")
        prompt = _as_messages(messages) if images is None else images.messages(messages)
        worker = self._server().fork(f"rank {self.rank} environment {row}")
        self.rows[row] = Row(worker, prompt, columns, images)
        if self.endpoint is not None:
            self._ask(row, {"run": {"row": columns, "seed": seed, **self.endpoint.begin(row, images)}})
        else:
            self._ask(row, {"begin": {"messages": prompt, "columns": columns, "seed": seed}})

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float] = ()) -> None:
        state = self._idle(row)
        state.turn += 1
        state.cut = ended_by_limit
        if self.endpoint is not None:
            if not state.worker.has_answer():  # otherwise it has ended, and did not wait
                self.endpoint.answer(row, ids, logprobs, ended_by_limit)
            self._resume(row)
            return
        turn = self._chat().turn(ids, state.context)
        if self.speaks == "tool" and (not turn.calls or ended_by_limit and any("error" in c for c in turn.calls)):
            state.why = "max_new_tokens" if ended_by_limit else "no_call"
            self._ask(row, {"reward": True})
        else:
            self._ask(row, {"answer": {"content": turn.content, "calls": list(map(whole, turn.calls))}})

    def finish(self, row: int, why: Stopped) -> None:
        self._idle(row).why = why
        if self.endpoint is not None:
            self.endpoint.stop(row, why)
            self._resume(row)
        else:
            self._ask(row, {"reward": True})

    def arrivals(self, wait: bool) -> list[Arrival]:
        if wait and not self.ready and not self._busy():
            raise internal_error("no conversation waits for its environment", "run")
        self._look(0.0)
        while wait and not self.ready:
            self._look(self._seconds_left())
        arrived, self.ready = self.ready, []
        return arrived

    def watch(self, selector: selectors.BaseSelector) -> float | None:
        workers = [worker for _, worker in self._busy()]
        if not (workers or self.ready):
            return None
        self._register(selector, workers)
        return self._seconds_left()

    def close(self) -> None:
        """End all processes. It may be called again."""
        for worker in [row.worker for row in self.rows.values()] + [worker for _, worker in self.ending]:
            worker.end()
        self.rows.clear()
        self.ending.clear()
        if self.endpoint is not None:
            self.endpoint.close()
        if self.server is not None:
            self.server.close()
            self.server = None

    # requests and answers

    def _described(self) -> dict[str, Any]:
        worker = self._server().fork(f"rank {self.rank} environment")
        self.rows[-1] = Row(worker, [], {})
        try:
            worker.send_request(RowChunk(-1, 0), {"describe": True}, self.loading)
            while not worker.has_answer() and time.monotonic() < worker.deadline:
                self._wait_for([worker], worker.deadline - time.monotonic())
                worker.print_output()
            return self._answer_of(-1, self.loading)
        finally:
            self._release(-1)

    def _ask(self, row: int, request: dict[str, Any]) -> None:
        state = self.rows[row]
        state.worker.begin_turn()
        state.printed = state.worker.num_printed
        try:
            state.worker.send_request(RowChunk(row, row + 1), request, self.turn_timeout)
        except (ConnectionError, TimeoutError):
            state.worker.deadline = time.monotonic()  # the next look finds out why

    def _resume(self, row: int) -> None:
        """An agent continues: it has `turn_timeout` until it asks again or returns."""
        state = self.rows[row]
        state.worker.begin_turn()
        state.printed = state.worker.num_printed
        state.worker.work = RowChunk(row, row + 1)
        state.worker.deadline = time.monotonic() + self.turn_timeout

    def _busy(self) -> list[tuple[int, ForkedWorker]]:
        return [(row, state.worker) for row, state in self.rows.items() if state.worker.work is not None]

    def _look(self, seconds: float) -> None:
        """Wait until an environment needs attention, and handle all that do."""
        self._wait_for([worker for _, worker in self._busy()], min(seconds, self._seconds_left()))
        self._hear()
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
            self._arrived(arrival)
        self._reap()

    def _hear(self) -> None:
        """Take what agents have asked."""
        if self.endpoint is None:
            return
        self.endpoint.poll()
        while (event := self.endpoint.next()) is not None:
            row, heard = event
            if isinstance(heard, Heard):
                self.rows[row].worker.work = None  # it waits for the model
                self._arrived(Arrival(row, heard.tokens, False, None, None, None, heard.branch))
                continue
            if isinstance(heard, Refused):
                failure = self._at(heard.code, heard.what, "", row, heard.help)
            else:
                (diagnostic,) = heard.diagnostics
                failure = Failure([replace(diagnostic, notes=(*diagnostic.notes, *self._notes(row)))])
            self._arrived(self._failed(row, failure))

    def _arrived(self, arrival: Arrival) -> None:
        if arrival.ended:
            self._release(arrival.row)
        else:
            state = self.rows[arrival.row]
            state.context = tuple(state.images.plain_ids(arrival.tokens)) if state.images else arrival.tokens
        self.ready.append(arrival)

    def _answer_of(self, row: int, seconds: float) -> dict[str, Any]:
        """What has arrived from a process. A Failure if it is an error, or if nothing will arrive."""
        worker = self.rows[row].worker
        if worker.num_printed - self.rows[row].printed > LARGEST_OUTPUT:
            lines = worker.request_stack()
            worker.end()
            raise self._at("RL0717", f"printed more than {LARGEST_OUTPUT >> 20} MiB in one turn", lines, row,
                           help="print less, or into a file")
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
            lines = worker.crash_stack()
            how, help_ = ended(worker.end())
            raise self._at("RL0717", f"ended its process ({how})", lines, row, help=help_)
        if "error" in answer:
            (diagnostic,) = failure_from(answer["error"]).diagnostics
            raise Failure([replace(diagnostic, notes=(*diagnostic.notes, *self._notes(row)))])
        return dict(answer)

    def _arrival(self, row: int, answer: dict[str, Any]) -> Arrival:
        state, chat = self.rows[row], self._chat()
        if self.endpoint is not None:
            return self._returned(row, self.endpoint, answer["reward"])
        if state.why is not None:
            return Arrival(row, (), True, state.why, answer["reward"], None)
        if answer.get("done"):
            return Arrival(row, (), True, "done", answer["reward"], answer["turn_reward"])
        if half := half_character(answer["messages"]):
            raise self._at("RL0715", f"said what no tokenizer encodes: {half}", "", row,
                           help='make it text: `text.encode("utf-8", "replace").decode()`, or decode bytes with '
                                '`errors="replace"`')
        tokens = chat.reply(answer["messages"], state.cut) if state.turn else chat.first(answer["messages"],
                                                                                         state.images)
        return Arrival(row, tokens, False, None, None, answer.get("turn_reward"))

    def _returned(self, row: int, endpoint: Endpoint, reward: float) -> Arrival:
        """The end of a conversation whose agent has returned."""
        state = self.rows[row]
        endpoint.poll()  # what it has asked before it returned is here by now
        if endpoint.waits(row):
            raise self._at("RL0737", "returned before its request was answered", "", row,
                           "wait for each answer before asking again, and before returning")
        if not endpoint.asked(row):
            raise self._at("RL0739", "returned without asking the model", "", row,
                           "ask it at `base_url` with `api_key`; a row without a turn cannot be trained")
        why = self._limit_of(row) or ("max_new_tokens" if state.cut else "done")
        return Arrival(row, (), True, why, reward, None)

    def _limit_of(self, row: int) -> Stopped | None:
        """The limit of the program that ends a conversation, if one does."""
        full = self.endpoint is not None and self.endpoint.full(row)
        return self.rows[row].why or ("max_tokens" if full else None)

    def _failed(self, row: int, failure: Failure) -> Arrival:
        (diagnostic,) = failure.diagnostics
        if self.endpoint is not None and diagnostic.code == "RL0714" and (limit := self._limit_of(row)) is not None:
            # most likely it has let the error pass that told it so
            print(f"{diagnostic.place}: {diagnostic.title}; {self._notes(row)[0]}: its conversation had reached its "
                  f"{limit}, and its reward is 0", file=sys.stderr, flush=True)
            return Arrival(row, (), True, limit, None, None)
        if self.on_error == "stop":
            self._release(row)
            raise failure
        call = f" of the call at {self.at}" if self.at else ""
        print(f"{diagnostic.place}: {diagnostic.code} {diagnostic.title}; {'; '.join(self._notes(row)[:1])}: its "
              f"conversation{call} ends (on_error=end)", file=sys.stderr, flush=True)
        state = self.rows[row]
        tokens = () if state.turn or state.context else self._chat().first(state.messages, state.images)
        return Arrival(row, tokens, True, "timeout" if diagnostic.code == "RL0716" else "error", None, None)

    # processes

    def _wait_for(self, workers: Sequence[ForkedWorker], seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            self._register(selector, workers)
            selector.select(max(0.0, seconds))

    def _register(self, selector: selectors.BaseSelector, workers: Sequence[ForkedWorker]) -> None:
        for worker in workers:
            if worker.peer.fileno() >= 0:
                selector.register(worker.peer, selectors.EVENT_READ)
                selector.register(worker.output, selectors.EVENT_READ)
        if self.endpoint is not None:
            self.endpoint.register(selector)

    def _seconds_left(self) -> float:
        """Until the first deadline; 0 if there is something to take already."""
        if self.ready or self.endpoint is not None and self.endpoint.heard:
            return 0.0
        first = min((w.deadline for _, w in self._busy()), default=0.0)
        return max(0.0, first - time.monotonic())

    def _release(self, row: int) -> None:
        """Let the process of a conversation end."""
        worker = self.rows.pop(row).worker
        if self.endpoint is not None:
            self.endpoint.end(row)
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
        return fail(code, f"`{self.function.name}` {what}", place=innermost_place(self.function, lines),
                    notes=self._notes(row) if row is not None else (), help=help)

    def _notes(self, row: int) -> tuple[str, ...]:
        """Where in its conversation the environment is."""
        if row < 0:
            return ("when it was created, before the first conversation",)
        state = self.rows[row]
        turn = state.turn if state.turn or state.context else None
        return in_conversation(row, state.messages, turn, "in `reset`" if self.endpoint is None else
                               "before its first turn")

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
