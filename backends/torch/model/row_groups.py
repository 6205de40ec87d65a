"""Sums over the rows of a pass in one order, whatever else is in the pass (`invariant=training`).

In: the sizes of runs of rows, by the leaves of a minibatch (`sharding/gradient_leaves.py`) and in each leaf by groups
of tokens (`token_groups.py`). Out: what each run adds to a gradient, added first in its leaf and then over the leaves,
in one binary tree: the sum that separate passes over the leaves have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rldsl.backends.torch.model.collectives import tree_of

# [leaf][group] rows, one run after the other; a power of two of leaves, each with as many groups. (): all rows are one
RowGroups = Sequence[Sequence[int]]


def sparse_tree_sum(first: int, count: int, part: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
    """part(first) + ... + part(first + count - 1) as a binary tree. Some of them may be None: they add nothing. At most
    1 + log2(count) of them exist at a time; their storage is reused."""
    if count == 1:
        return part(first)
    left, right = (sparse_tree_sum(at, count // 2, part) for at in (first, first + count // 2))
    return right if left is None else left if right is None else left.add_(right)


def sum_over_groups(groups: RowGroups, part: Callable[[slice], torch.Tensor], dtype: torch.dtype
                    ) -> torch.Tensor | None:
    """The sum of part(rows) over all groups that have rows, called in their order; None if none has. The results are
    reused as storage. The sum of a leaf is rounded to `dtype`; that of several leaves is float32."""
    starts = [0]
    for size in (size for leaf in groups for size in leaf):
        starts.append(starts[-1] + size)

    def leaf(i: int) -> torch.Tensor | None:
        first, count = i * len(groups[i]), len(groups[i])
        runs = [slice(starts[j], starts[j + 1]) for j in range(first, first + count)]
        parts = [part(rows) for rows in runs if rows.stop > rows.start]
        if not parts:
            return None
        total = _rounded_once(parts, dtype)
        return total if len(groups) == 1 else total.float()

    return sparse_tree_sum(0, len(groups), leaf)


def _rounded_once(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of what groups add to a gradient. Overwrites the parts."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2 and parts[0].dtype == dtype:  # torch adds two numbers in float32, too
        return parts[0].add_(parts[1])
    return tree_of(torch.stack([p.float() for p in parts])).to(dtype)
