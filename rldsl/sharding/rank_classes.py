"""Groups of ranks that are in the same places and so do the same, found from ranges: the cost depends on the size of a
plan, not on the number of ranks.

In: for each place (a mesh, a stage of a layout) the ranks that are in it. Out: the ranks by the places that they are
in, for the memory estimate and the verifier. `plan.projection.rank_classes`, which makes the classes that the verifier
checks, goes rank by rank on purpose: a proof shares no code with what it proves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from itertools import chain, pairwise
from typing import TypeVar

from rldsl.plan.model import Ranges

Where = TypeVar("Where", bound=Hashable)


def ranks_by_membership(places: Mapping[Where, Ranges], world: int) -> dict[frozenset[Where], Ranges]:
    """Set of places -> the ranks that are in exactly these, in the order of their first ranks. The ranges of one place
    are disjoint, in any order. The returned ranges ascend and are split at every boundary of every place, so all ranks
    of one range are in the same places."""
    boundaries: dict[int, set[Where]] = defaultdict(set)  # rank -> places that begin or end there
    for place, ranges in places.items():
        for end in chain.from_iterable(ranges):
            boundaries[end] ^= {place}
    inside: frozenset[Where] = frozenset()
    ranks: dict[frozenset[Where], list[tuple[int, int]]] = defaultdict(list)
    for start, stop in pairwise(sorted({0, world, *boundaries})):
        inside ^= boundaries.get(start, set())
        ranks[inside].append((start, stop))
    return {members: tuple(ranges) for members, ranges in ranks.items()}
