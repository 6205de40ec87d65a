"""Sets of ranks as ranges, so that a check costs what the plan says and not how many ranks it is for.

In: ranges of ranks. Out: `Ranks`, with the operators of sets. Invariant: the ranges of one are disjoint, ascending,
not empty, and no two of them touch; so equal sets are equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from rldsl.plan.model import Ranges
from rldsl.sharding.rank_classes import ranks_by_membership as sweep

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ranks:
    ranges: Ranges = ()

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]], world: int) -> Ranks:
        """Of ranges in any order, which may overlap or lie outside the world: the ranks that exist."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted((max(a, 0), min(b, world)) for a, b in ranges):
            if start >= stop:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return Ranks(tuple(merged))

    @staticmethod
    def one(rank: int) -> Ranks:
        return Ranks(((rank, rank + 1),))

    @property
    def first(self) -> int:
        return self.ranges[0][0]

    def __len__(self) -> int:
        return sum(b - a for a, b in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(a, b) for a, b in self.ranges)

    def __contains__(self, rank: int) -> bool:
        return any(a <= rank < b for a, b in self.ranges)

    def __or__(self, other: Ranks) -> Ranks:
        return self if self == other else _combined(self, other, lambda a, b: a or b)

    def __and__(self, other: Ranks) -> Ranks:
        return self if self == other else _combined(self, other, lambda a, b: a and b)

    def __sub__(self, other: Ranks) -> Ranks:
        return Ranks() if self == other else _combined(self, other, lambda a, b: a and not b)

    def __xor__(self, other: Ranks) -> Ranks:
        return Ranks() if self == other else _combined(self, other, lambda a, b: a != b)

    def __le__(self, other: Ranks) -> bool:
        return not self - other


def union(sets: Iterable[Ranks]) -> Ranks:
    every = [r for s in sets for r in s.ranges]
    return Ranks.of(every, max((b for _, b in every), default=0))


def alike(places: Mapping[Place, Ranks], world: int) -> dict[frozenset[Place], Ranks]:
    """The ranks of the world by the places that they are in: those with the same ones can do no different thing."""
    found = sweep({place: ranks.ranges for place, ranks in places.items()}, world)
    return {mine: Ranks.of(ranges, world) for mine, ranges in found.items()}


def _combined(a: Ranks, b: Ranks, keep: Callable[[bool, bool], bool]) -> Ranks:
    """The ranks for which `keep` says so, from whether they are in each of the two."""
    in_a, in_b = set(chain.from_iterable(a.ranges)), set(chain.from_iterable(b.ranges))
    one = two = now = False
    ends: list[int] = []
    for point in sorted(in_a | in_b):
        one ^= point in in_a
        two ^= point in in_b
        if keep(one, two) != now:
            now = not now
            ends.append(point)
    return Ranks(tuple(zip(ends[::2], ends[1::2], strict=True)))
