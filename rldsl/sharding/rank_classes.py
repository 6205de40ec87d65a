"""Groups of ranks that belong to the same sets of ranks and so do the same, found from ranges: the cost depends on the
size of a plan, not on the number of ranks.

In: named sets of ranks (a mesh, a pp rank of a layout). Out: the ranks by the sets that they belong to, for the memory
estimate and the verifier. `plan.projection.rank_classes`, which makes the classes that the verifier
checks, goes rank by rank on purpose: a proof shares no code with what it proves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from itertools import chain, pairwise
from typing import TypeVar

from rldsl.plan.model import Ranges

Name = TypeVar("Name", bound=Hashable)


def ranks_by_membership(rank_sets: Mapping[Name, Ranges], world: int) -> dict[frozenset[Name], Ranges]:
    """Names of sets -> the ranks that are in exactly these sets, in the order of their first ranks. The ranges of one
    set are disjoint, in any order. The returned ranges ascend and are split at every boundary of every set, so all
    ranks of one range are in the same sets."""
    boundaries: dict[int, set[Name]] = defaultdict(set)  # rank -> sets that begin or end there
    for name, ranges in rank_sets.items():
        for end in chain.from_iterable(ranges):
            boundaries[end] ^= {name}
    inside: frozenset[Name] = frozenset()
    ranks: dict[frozenset[Name], list[tuple[int, int]]] = defaultdict(list)
    for start, stop in pairwise(sorted({0, world, *boundaries})):
        inside ^= boundaries.get(start, set())
        ranks[inside].append((start, stop))
    return {members: tuple(ranges) for members, ranges in ranks.items()}
