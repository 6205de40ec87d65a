"""Conversations whose environment is a script: in this process, without a clock, in any order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rldsl.diag import internal_error
from rldsl.runtime.environments.conversations import Arrival, Message, Stopped


@dataclass(frozen=True)
class Reply:
    """What a script says to a turn."""

    tokens: tuple[int, ...] = ()        # context; () if it ends the conversation
    stopped: Stopped | None = None      # why it ends it
    turn_reward: float | None = None    # of the turn that it answers


@dataclass
class Scripted:
    """Implements `Conversations`. `looks` delays an arrival by a number of calls of `arrivals` instead of a time, so
    that a test chooses the order in which environments answer."""

    # (row, columns, messages, seed) -> the first context
    first: Callable[[int, Mapping[str, object], str | Sequence[Message], int], Sequence[int]]
    # (row, turn, ids of the model's turn, whether it was cut off) -> the reply; turns count from 0
    answer: Callable[[int, int, tuple[int, ...], bool], Reply]
    # (row, all turns of the model) -> `get_reward()`
    reward: Callable[[int, list[tuple[int, ...]]], float | None] = lambda row, turns: None
    # (row, turn) -> how many calls of `arrivals` its answer is withheld; turn 0 is `begin`
    looks: Callable[[int, int], int] = lambda row, turn: 0
    turns: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)       # of rows that are alive
    pending: list[tuple[int, Arrival]] = field(default_factory=list)            # (looks left, arrival)
    log: list[tuple[str, int]] = field(default_factory=list)                    # (call, row), in order
    closed: bool = False

    def begin(self, row: int, columns: Mapping[str, object], messages: str | Sequence[Message], seed: int) -> None:
        self._called("begin", row, alive=False)
        self.turns[row] = []
        tokens = tuple(self.first(row, columns, messages, seed))
        self.pending.append((self.looks(row, 0), Arrival(row, tokens, False, None, None, None)))

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool) -> None:
        self._called("said", row)
        turn = len(self.turns[row])
        self.turns[row].append(tuple(ids))
        reply = self.answer(row, turn, tuple(ids), ended_by_limit)
        ended = reply.stopped is not None
        reward = self.reward(row, self.turns[row]) if ended else None
        arrival = Arrival(row, () if ended else reply.tokens, ended, reply.stopped, reward, reply.turn_reward)
        self.pending.append((self.looks(row, turn + 1), arrival))

    def finish(self, row: int, why: Stopped) -> None:
        self._called("finish", row)
        arrival = Arrival(row, (), True, why, self.reward(row, self.turns[row]), None)
        self.pending.append((self.looks(row, len(self.turns[row]) + 1), arrival))

    def arrivals(self, wait: bool) -> list[Arrival]:
        if wait and not self.pending:
            raise internal_error("no conversation waits for its environment", "run")
        skipped = min((looks for looks, _ in self.pending), default=0) if wait else 0
        ready = [arrival for looks, arrival in self.pending if looks <= skipped]
        self.pending = [(looks - skipped - 1, arrival) for looks, arrival in self.pending if looks > skipped]
        for arrival in ready:
            if arrival.ended:
                del self.turns[arrival.row]
        return ready

    def close(self) -> None:
        self.closed = True
        self.pending.clear()

    def _called(self, what: str, row: int, alive: bool = True) -> None:
        if (row in self.turns) != alive or any(a.row == row for _, a in self.pending) or self.closed:
            raise internal_error(f"`{what}` of row {row} at the wrong time", "run")
        self.log.append((what, row))
