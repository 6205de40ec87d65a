"""The turns of a loop by what happens in them, so that a loop of a million turns costs what one of a few does.

In: a loop inside a step. Out: for each kind of turn how often there is one. An `every` counts the turns of the loop
around it, and one inside another runs where both do, as `plan/project.times` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from rldsl.plan.events import Every, Item, Loop

PLAYED = 3  # turns of a kind; the last one is steady, as the last of so many steps is


@dataclass(frozen=True, slots=True)
class Kind:
    """Turns whose numbers are multiples of those periods of the loop that divide `multiple`, and of no others. played:
    one by one. left: how many more there are."""

    multiple: int
    played: int
    left: int

    def runs(self, period: int) -> bool:
        """Whether what happens every so many turns happens in these."""
        return self.multiple % period == 0


def kinds(loop: Loop) -> tuple[Kind, ...]:
    """Every kind of turn that there is, the rarest first; together they are all turns."""
    multiples = {1}
    for period in sorted(set(_periods(loop.body))):
        multiples |= {both for m in multiples if (both := lcm(m, period)) <= loop.trips}
    exact: dict[int, int] = {}
    for m in sorted(multiples, reverse=True):
        exact[m] = loop.trips // m - sum(n for other, n in exact.items() if other % m == 0)
    found = sorted((n, m) for m, n in exact.items() if n)
    return tuple(Kind(m, min(n, PLAYED), max(n - PLAYED, 0)) for n, m in found)


def _periods(body: Sequence[Item], around: int = 1) -> Iterator[int]:
    """Of the `every`s that count turns of the loop."""
    for item in body:
        if isinstance(item, Every):
            both = lcm(around, item.period)
            if both > 1:
                yield both
            yield from _periods(item.body, both)
