"""Gradients that do not depend on a placement (`invariant=training`): sums in one order, and an exact norm.

In: the gradients of each leaf of a minibatch (`sharding/gradient_leaves.py`), one leaf after the other. Out: their sum
as a binary tree over the leaves, first those of a rank, then (`collectives.py`) those of all ranks of dp; and the
2-norm of gradients that are divided over ranks in any way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from rldsl.runtime.collectives import all_reduce

LIMB = 28  # bits: 2^35 squares of a limb fit into an int64
CHUNK = 1 << 16  # elements whose squares are in float64 at a time, in a cache: sums of so many limbs are exact


class LeafSums:
    """The tree over the leaves of one rank. As many tensors exist as a binary counter of the leaves has ones.

    The gradients of a leaf stay in the tensor to which its passes have added them until another leaf needs it, so that
    a minibatch with rows in one leaf costs what one without leaves does. A leaf without rows adds nothing: x + 0.0 is
    x, since sums that begin with 0.0 are never -0.0."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, torch.Tensor | None]] = []  # (leaves in it, their sum), from the left
        self._last: list[torch.Tensor | None] = []  # leaves that are not in it yet; one has rows at most

    def begin(self) -> None:
        """Before passes add to the tensor that the last leaf has ended with: empty it."""
        leaf = next((x for x in self._last if x is not None), None)
        if leaf is None:
            return
        self._fold()
        self._nodes = [(size, total.clone() if total is leaf else total) for size, total in self._nodes]
        leaf.zero_()

    def end(self, leaf: torch.Tensor | None) -> None:
        """The gradients of the next leaf, whose tensor is used until the next `begin`, and given away if there is none.
        None: it has no rows."""
        if leaf is not None and any(x is not None for x in self._last):
            self._fold()
        self._last.append(leaf)

    def take(self) -> torch.Tensor | None:
        """The sum of all leaves, whose number is a power of two; None if none has rows. Then there are none. It is in
        the tensor of the last leaf with rows, unless a `begin` came since."""
        self._fold(into_last=True)
        ((_, total),) = self._nodes
        self.clear()
        return total

    def clear(self) -> None:
        self._nodes.clear()
        self._last.clear()

    def _fold(self, into_last: bool = False) -> None:
        """Make the last leaves nodes. into_last: where two tensors are added, the sum is in that on the right."""
        for total in self._last:
            size = 1
            while self._nodes and self._nodes[-1][0] == size:
                left = self._nodes.pop()[1]
                if left is not None and total is not None:
                    total = total.add_(left) if into_last else left.add_(total)
                elif total is None:
                    total = left
                size *= 2
            self._nodes.append((size, total))
        self._last.clear()


def exact_norm(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The 2-norm of all gradients on all ranks of a group (None: this one alone), each element on one of them: the same
    however they are divided. inf if an element is not finite.

    Squares are numbers of fixed point relative to the largest, with 56 bits behind the point; integers are added."""
    gradients = [g for g in gradients if g.numel()]
    peak = torch.zeros(1, dtype=torch.float64, device=device)
    for g in gradients:
        peak = torch.maximum(peak, g.abs().max().double())  # keeps a NaN
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
