"""The iterations of a loop by what runs in them, so that simulating a million iterations costs as much as a few.

In: a loop inside a step. Out: for each kind of iteration how often it occurs. An `every` counts the iterations of the
loop around it, and an `every` inside another runs where both do, as `plan/projection.times` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from rldsl.plan.events import Every, Item, Loop

SIMULATED = 3  # iterations of a kind that are simulated; only the last one is steady, as for steps


@dataclass(frozen=True, slots=True)
class IterationKind:
    """Iterations whose numbers are multiples of exactly those periods of the loop that divide `multiple`."""

    multiple: int  # of those periods
    simulated: int  # op by op
    left: int  # extrapolated from the last of these

    def runs(self, period: int) -> bool:
        """Whether an `every` of this period runs in these iterations."""
        return self.multiple % period == 0


def iteration_kinds(loop: Loop) -> tuple[IterationKind, ...]:
    """Every kind of iteration, the rarest first; together they are all iterations."""
    multiples = {1}
    for period in sorted(set(_periods(loop.body))):
        multiples |= {both for m in multiples if (both := lcm(m, period)) <= loop.trips}
    exact: dict[int, int] = {}
    for m in sorted(multiples, reverse=True):
        exact[m] = loop.trips // m - sum(n for other, n in exact.items() if other % m == 0)
    found = sorted((n, m) for m, n in exact.items() if n)
    return tuple(IterationKind(m, min(n, SIMULATED), max(n - SIMULATED, 0)) for n, m in found)


def _periods(body: Sequence[Item], around: int = 1) -> Iterator[int]:
    """The periods of the `every`s that count iterations of the loop."""
    for item in body:
        if isinstance(item, Every):
            both = lcm(around, item.period)
            if both > 1:
                yield both
            yield from _periods(item.body, both)
