"""Ranks that are in the same places do the same: found from ranges, so that it costs what a plan says and not how many
ranks it is for.

In: for each place (a mesh, a stage of a layout) the ranks that are in it. Out: the ranks by the places that they are
in. The one sweep for the estimate of memory and for the verifier. `project.rank_classes`, which makes the classes that
the verifier proves, counts rank by rank on purpose: what is proved and what proves it share no code. """

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from itertools import chain, pairwise
from typing import TypeVar

from rldsl.plan.model import Ranges

Where = TypeVar("Where", bound=Hashable)


def ranks_by_membership(places: Mapping[Where, Ranges], world: int) -> dict[frozenset[Where], Ranges]:
    """All ranks of the world, in the order of their first ones. The ranges of one place are disjoint, in any order;
    those of the result ascend and end wherever a range of any place does, so that inside one every mesh counts on."""
    turns: dict[int, set[Where]] = defaultdict(set)
    for place, ranges in places.items():
        for end in chain.from_iterable(ranges):
            turns[end] ^= {place}
    inside: frozenset[Where] = frozenset()
    found: dict[frozenset[Where], list[tuple[int, int]]] = defaultdict(list)
    for start, stop in pairwise(sorted({0, world, *turns})):
        inside ^= turns.get(start, set())
        found[inside].append((start, stop))
    return {mine: tuple(ranges) for mine, ranges in found.items()}
