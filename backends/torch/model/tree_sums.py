"""Sums that tensor parallelism divides, in one order whatever its degree: blocks are added in a binary tree, first
those of a rank, then those of all ranks.

In: the inputs of a row-parallel weight, or weights of the vocabulary, and where they are cut
(`sharding/sum_blocks.py`). Out: this rank's node of the tree (`row_parallel_product`, `block_sums`), and the root
(`collectives.py` with `tree=True`). In bfloat16 the blocks are rounded as partial sums of ranks always are; they are
added in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels.fixed_order import row_sum
from rldsl.backends.torch.model.lora import LoraAdapter


def tree_sum(count: int, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """part(0) + ... + part(count - 1) in float32, as a binary tree. At most 1 + log2(count) of them exist at a time."""
    def node(first: int, size: int) -> torch.Tensor:
        if size == 1:
            return part(first).float()
        return node(first, size // 2) + node(first + size // 2, size - size // 2)

    return node(0, count)


def sparse_tree_sum(first: int, count: int, part: Callable[[int], torch.Tensor | None]) -> torch.Tensor | None:
    """`tree_sum` over part(first) ... part(first + count - 1), of which some may be None: they add nothing."""
    if count == 1:
        return part(first)
    left, right = (sparse_tree_sum(at, count // 2, part) for at in (first, first + count // 2))
    return right if left is None else left if right is None else left + right


def row_parallel_product(x: torch.Tensor, weight: torch.Tensor, cuts: Sequence[int],
                         adapter: LoraAdapter | None = None,
                         linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear) -> torch.Tensor:
    """x [..., k] @ weight [m, k].T + adapter(x) -> [..., m] float32, block by block of k. linear: (x, weight) -> the
    product of a block."""
    sizes = [stop - start for start, stop in pairwise(cuts)]
    inputs, columns = x.split(sizes, -1), weight.split(sizes, 1)
    factors = () if adapter is None else adapter.a.split(sizes, 1)

    def part(i: int) -> torch.Tensor:
        out = linear(inputs[i], columns[i])
        return out if adapter is None else out + LoraAdapter(factors[i], adapter.b, adapter.scale)(inputs[i])

    return tree_sum(len(sizes), part)


def block_sums(x: torch.Tensor, cuts: Sequence[int] | None) -> torch.Tensor:
    """[N, V] -> [N], over blocks of columns; without cuts all at once."""
    if cuts is None:
        return x.sum(-1)
    return tree_sum(len(cuts) - 1, lambda i: row_sum(x[:, cuts[i] : cuts[i + 1]]))
