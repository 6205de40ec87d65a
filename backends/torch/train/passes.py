"""The passes of a minibatch, by the sums of their gradients.

In: the micro-batches of a rank, and with `invariant=training` how many of them each leaf of the minibatch has. Out: the
passes of each sum that `model/leaf_sums.py` adds to the tree: those of a leaf one after the other, or one pass over
several leaves, in which every weight sums its gradient leaf by leaf (`model/row_groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TrainPass:
    """Micro-batches that are computed together."""

    members: tuple[int | None, ...]  # the micro-batch of each leaf; None: this rank has no rows of the leaf
    with_rows: tuple[int, ...]       # those of them that have rows; none in an empty pass, which only other ranks need


def passes_by_sum(leaves: Sequence[int], joined: int, has_rows: Sequence[bool], run_empty: bool
                  ) -> list[list[TrainPass]]:
    """leaves: micro-batches of each, one leaf after the other; at most one, if several are joined. joined: leaves of a
    pass, which divides their number. run_empty: other ranks wait for the passes of this one, also for those without
    rows."""
    numbers = [range(last - count, last) for last, count in zip(accumulate(leaves), leaves, strict=True)]
    if joined == 1:
        return [[TrainPass((i,), (i,) if has_rows[i] else ()) for i in leaf if has_rows[i] or run_empty]
                for leaf in numbers]
    found: list[list[TrainPass]] = []
    for run in (numbers[at : at + joined] for at in range(0, len(numbers), joined)):
        members = [next((i for i in leaf if has_rows[i]), None) for leaf in run]
        with_rows = tuple(i for i in members if i is not None)
        empty = [i for leaf in run for i in leaf] if run_empty and not with_rows else []
        if empty:
            members[0] = empty[0]
        found.append([TrainPass(tuple(members), with_rows)] if with_rows or empty else [])
    return found
