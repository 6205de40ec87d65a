"""Conversations of one call with several environments: a column of the data names that of each row.

In: the conversations with each of them, by the name of its class. Out: an implementation of `Conversations`.
"""

from __future__ import annotations

import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rldsl.diag import internal_error
from rldsl.runtime.environments import Arrival, ContextImages, Conversations, Message, ResetParameters, Stopped

COLUMN = "env"  # of the data: the name of a row's environment


@dataclass
class SeveralEnvironments:
    """Each row talks with the environment that its column `env` names."""

    named: Mapping[str, Conversations]  # name of the class -> the conversations with it
    rows: dict[int, Conversations] = field(default_factory=dict, init=False)  # that are alive

    @property
    def takes(self) -> ResetParameters:
        return ResetParameters((COLUMN,))

    def begin(self, row: int, columns: Mapping[str, object], messages: str | Sequence[Message], seed: int,
              images: ContextImages | None = None) -> None:
        self.rows[row] = self.named[str(columns[COLUMN])]
        self.rows[row].begin(row, columns, messages, seed, images)

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float] = ()) -> None:
        self.rows[row].said(row, ids, ended_by_limit, logprobs)

    def finish(self, row: int, why: Stopped) -> None:
        self.rows[row].finish(row, why)

    def arrivals(self, wait: bool) -> list[Arrival]:
        found = self._look()
        while wait and not found:
            with selectors.DefaultSelector() as selector:
                limits = [limit for each in self.named.values() if (limit := each.watch(selector)) is not None]
                if not limits:
                    raise internal_error("no conversation waits for its environment", "run")
                selector.select(min(limits))
            found = self._look()
        for arrival in found:
            if arrival.ended:
                del self.rows[arrival.row]
        return found

    def watch(self, selector: selectors.BaseSelector) -> float | None:
        limits = [limit for each in self.named.values() if (limit := each.watch(selector)) is not None]
        return min(limits, default=None)

    def close(self) -> None:
        for each in self.named.values():
            each.close()

    def _look(self) -> list[Arrival]:
        return [arrival for each in self.named.values() for arrival in each.arrivals(wait=False)]
