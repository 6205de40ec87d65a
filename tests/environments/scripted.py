"""Environments in the rank's own process that answer late, in an order that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rldsl.runtime.environments import Arrival, ResetParameters, Stopped
from tests.environments.envs_scripted import Guess


class Scripted:
    """`Conversations` with `Guess`. delays: of answers; without, each arrives at once."""

    takes = ResetParameters()

    def __init__(self, tokenizer: Any, delays: int | None = None):
        self.tokenizer, self.random = tokenizer, None if delays is None else random.Random(delays)
        self.live: dict[int, Guess] = {}
        self.under_way: list[Arrival] = []
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, row: int, columns: Mapping[str, Any], messages: Any, seed: int, images: None = None) -> None:
        self.calls.append(("begin", row, messages))
        self.live[row] = Guess()
        self.live[row].reset(**columns)
        self._say(row, messages)

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float] = ()) -> None:
        assert len(logprobs) == len(ids)
        self.calls.append(("said", row, tuple(ids), ended_by_limit))
        reply = self.live[row].reply(self.tokenizer.decode(ids))
        if reply is None:
            self._end(row, "done")
        else:
            self._say(row, reply, turn_reward=float(len(ids)))

    def finish(self, row: int, why: Stopped) -> None:
        self.calls.append(("finish", row, why))
        self._end(row, why)

    def arrivals(self, wait: bool) -> list[Arrival]:
        if self.random is None:
            found, self.under_way = self.under_way, []
            return found
        self.random.shuffle(self.under_way)
        count = self.random.randint(int(wait), 2)
        found, self.under_way = self.under_way[:count], self.under_way[count:]
        return found

    def close(self) -> None:
        self.live.clear()

    def _say(self, row: int, text: str, turn_reward: float | None = None) -> None:
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        self.under_way.append(Arrival(row, ids, False, None, None, turn_reward))

    def _end(self, row: int, why: Stopped) -> None:
        self.under_way.append(Arrival(row, (), True, why, self.live.pop(row).get_reward(), None))
