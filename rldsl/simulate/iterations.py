"""The iterations of a loop by what runs in them, so that simulating a million iterations costs as much as a few.

In: a loop inside a step. Out: for each kind of iteration how often it occurs. A `When` counts the iterations of the
loop around it, and a `When` inside another runs where both do, as `plan/projection.times` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count, pairwise
from math import lcm

from rldsl.plan.events import Item, Loop, When

SIMULATED = 3  # iterations of a kind that are simulated; only the last one is steady, as for steps


@dataclass(frozen=True, slots=True)
class IterationKind:
    """Iterations in which the same blocks run."""

    number: int  # of one of them, from 1
    simulated: int  # op by op
    left: int  # extrapolated from the last of these


def iteration_kinds(loop: Loop) -> tuple[IterationKind, ...]:
    """Every kind of iteration, the rarest first; together they are all iterations."""
    found: list[tuple[int, int]] = []  # how many, the number of one of them
    periods, bounds = set(_periods(loop.body)), set(_bounds(loop.body))
    multiples = {1}
    for period in sorted(periods):
        multiples |= {both for m in multiples if (both := lcm(m, period)) <= loop.trips}
    for low, high in pairwise(sorted({0, loop.trips, *(b for b in bounds if b < loop.trips)})):
        exact: dict[int, int] = {}  # multiple -> how many are multiples of exactly those periods that divide it
        for m in sorted(multiples, reverse=True):
            exact[m] = high // m - low // m - sum(n for other, n in exact.items() if other % m == 0)
        found += [(n, _one_of(m, low, multiples)) for m, n in exact.items() if n]
    return tuple(IterationKind(number, min(n, SIMULATED), max(n - SIMULATED, 0)) for n, number in sorted(found))


def _one_of(multiple: int, low: int, multiples: Set[int]) -> int:
    """The first number above `low` that is a multiple of this one, and of no other that does not divide it."""
    if low < multiple:
        return multiple
    others = [m for m in multiples if multiple % m]
    return next(n for n in count(low - low % multiple + multiple, multiple) if all(n % m for m in others))


def _periods(body: Sequence[Item], around: int = 1) -> Iterator[int]:
    """The periods of the blocks that count iterations of the loop."""
    for item in body:
        if isinstance(item, When):
            both = lcm(around, item.period)
            if both > 1:
                yield both
            yield from _periods(item.body, both)


def _bounds(body: Sequence[Item]) -> Iterator[int]:
    """The iterations after which blocks begin or end to run."""
    for item in body:
        if isinstance(item, When):
            yield from (item.after, item.first)
            yield from _bounds(item.body)
