"""Gradients that do not depend on a placement (`invariant=training`): sums in one order, and an exact norm.

In: the gradients of each leaf of a minibatch (`sharding/gradient_leaves.py`), one leaf after the other. Out: their sum
as a binary tree over the leaves, first those of a rank, then (`collectives.py`) those of all ranks of dp; and the
2-norm of gradients that are divided over ranks in any way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from rldsl.runtime.collectives import all_reduce

LIMB = 28  # bits: 2^35 squares of a limb fit into an int64
CHUNK = 1 << 16  # elements whose squares are in float64 at a time, in a cache: sums of CHUNK limbs are exact


Leaf = Sequence[torch.Tensor | None]  # gradients of some parameters, or joined ones; None: 0


class LeafSums:
    """The tree over the leaves of one rank. As many leaves exist as a binary counter of them has ones.

    Tensors are overwritten: the sum of two leaves is in those of the left one, so the sum of all is in those of the
    first leaf with rows. A leaf without rows adds nothing, and neither does a gradient that a leaf does not have. Zeros
    inside the tree may be -0.0, which no sum shows if those of the first leaf with rows are 0.0."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Leaf | None]] = []  # (leaves in it, their sum), from the left

    @property
    def has_rows(self) -> bool:
        """Whether a leaf so far has rows."""
        return any(total is not None for _, total in self._nodes)

    @torch.no_grad()
    def add(self, leaf: Leaf | None) -> None:
        """The gradients of the next leaf; None: it has no rows."""
        size, total = 1, leaf
        while self._nodes and self._nodes[-1][0] == size:
            left = self._nodes.pop()[1]
            total = left if total is None else total if left is None else _add(left, total)
            size *= 2
        self._nodes.append((size, total))

    def take(self) -> Leaf | None:
        """The sum of all leaves, whose number is a power of two; None if none has rows. Then there are none."""
        ((_, total),) = self._nodes
        self.clear()
        return total

    def clear(self) -> None:
        self._nodes.clear()


def _add(left: Leaf, right: Leaf) -> Leaf:
    """left + right, in the tensors of `left`."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    for a, b in both:
        a.add_(b)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def exact_norm(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The 2-norm of all gradients on all ranks of a group (None: this one alone), each element on one of them: the same
    however they are divided. inf if an element is not finite.

    Squares are numbers of fixed point relative to the largest, with 56 bits after the point; integers are added."""
    gradients = [g for g in gradients if g.numel()]
    peak = torch.zeros(1, dtype=torch.float64, device=device)
    for g in gradients:
        low, high = g.aminmax()
        peak = torch.maximum(peak, torch.maximum(-low, high).double())  # keeps a NaN
    peak = torch.where(peak.isnan(), torch.inf, peak)
    if group is not None:
        all_reduce(peak, dist.ReduceOp.MAX, group)
    largest = float(peak)
    if largest in (0.0, math.inf):
        return largest
    exponent = math.frexp(largest)[1]  # largest < 2^exponent
    limbs = torch.zeros(2, dtype=torch.int64, device=device)
    for part in (part for g in gradients for part in g.reshape(-1).split(CHUNK)):
        squares = (part.double() * 2.0 ** -exponent).square_().mul_(2.0**LIMB)
        high = squares.floor()
        low = squares.sub_(high).mul_(2.0**LIMB).floor_()
        limbs += torch.stack((high.sum(), low.sum())).to(torch.int64)
    if group is not None:
        all_reduce(limbs, group=group)
    high_sum, low_sum = map(int, limbs.tolist())
    return math.sqrt(((high_sum << LIMB) + low_sum) / (1 << 2 * LIMB)) * 2.0**exponent
