"""Sets of ranks as ranges, so that the cost of a check depends on the size of the plan, not on the number of ranks.

In: ranges of ranks. Out: `Ranks`, with the operators of sets. Invariant: the ranges of one are disjoint, ascending,
not empty, and no two of them touch; so equal sets are equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from rldsl.plan.model import Mesh, Ranges
from rldsl.sharding.rank_classes import ranks_by_membership

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ranks:
    ranges: Ranges = ()  # half-open, ascending, disjoint

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]], world: int) -> Ranks:
        """The ranks of the world in some ranges, which may come in any order, overlap or lie outside the world."""
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
    def of_mesh(mesh: Mesh) -> Ranks:
        return union_of_ranges(mesh.ranks)

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
    return union_of_ranges([r for s in sets for r in s.ranges])


def union_of_ranges(ranges: Sequence[tuple[int, int]]) -> Ranks:
    """The ranks in some ranges, which may come in any order and overlap."""
    return Ranks.of(ranges, max((stop for _, stop in ranges), default=0))


def group_equal_ranks(rank_sets: Mapping[Name, Ranks], world: int) -> dict[frozenset[Name], Ranks]:
    """The ranks of the world, grouped by the sets that they belong to. Ranks of one group do the same, so one of them
    is checked."""
    groups = ranks_by_membership({name: ranks.ranges for name, ranks in rank_sets.items()}, world)
    return {members: Ranks.of(ranges, world) for members, ranges in groups.items()}


def _combined(a: Ranks, b: Ranks, keep: Callable[[bool, bool], bool]) -> Ranks:
    """The ranks for which keep(in a, in b) is true."""
    ends_a, ends_b = set(chain.from_iterable(a.ranges)), set(chain.from_iterable(b.ranges))
    in_a = in_b = kept = False
    ends: list[int] = []
    for point in sorted(ends_a | ends_b):
        in_a ^= point in ends_a
        in_b ^= point in ends_b
        if keep(in_a, in_b) != kept:
            kept = not kept
            ends.append(point)
    return Ranks(tuple(zip(ends[::2], ends[1::2], strict=True)))
