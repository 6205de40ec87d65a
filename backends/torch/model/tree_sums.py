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
from typing import Any

import torch

from rldsl.backends.torch.kernels.autograd import Function, outside_modes
from rldsl.backends.torch.kernels.fixed_order import row_sum
from rldsl.backends.torch.model.invariant_products import linear, multiply, product_dtype, weight_gradient
from rldsl.backends.torch.model.lora import LoraAdapter
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies


def tree_sum(count: int, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """part(0) + ... + part(count - 1) in float32, as a binary tree. At most 1 + log2(count) of them exist at a time;
    their storage is reused."""
    def node(first: int, size: int) -> torch.Tensor:
        if size == 1:
            return part(first).float()
        return node(first, size // 2).add_(node(first + size // 2, size - size // 2))

    return node(0, count)


def row_parallel_product(x: torch.Tensor, weight: torch.Tensor, cuts: Sequence[int],
                         adapter: LoraAdapter | None = None, groups: RowGroups = (), copies: WeightCopies = NO_COPIES,
                         read: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] @ weight [m, k].T + adapter(x) -> [..., m] float32, block by block of k. groups: of the rows, in the
    gradient of the weight. copies: of weights. read: the weight as it multiplies (None: as `copies` have it)."""
    if adapter is None:
        x = x.to(product_dtype(x))
        read = copies.cast(weight, x.dtype) if read is None else read
        blocks = copies.blocks(weight if weight.dtype == x.dtype else read, x.dtype, cuts)
        out: torch.Tensor = _RowProduct.apply(x.reshape(-1, x.shape[-1]), weight, read, blocks, cuts, groups)
        return out.view(*x.shape[:-1], len(weight))
    sizes = [stop - start for start, stop in pairwise(cuts)]
    inputs, columns, factors = x.split(sizes, -1), weight.split(sizes, 1), adapter.a.split(sizes, 1)

    def part(i: int) -> torch.Tensor:
        out = linear(inputs[i], columns[i], groups=groups)
        return out + LoraAdapter(factors[i], adapter.b, adapter.scale)(inputs[i])

    return tree_sum(len(sizes), part)


class _RowProduct(Function):
    """x [n, k], weight [m, k] -> [n, m] float32. read: the weight, as it multiplies. blocks: of its columns. Nothing is
    cut in the gradients, whose sums are over m and n."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, read: torch.Tensor, blocks: Sequence[torch.Tensor],
                cuts: Sequence[int], groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(x, read)
        ctx.groups = groups
        with outside_modes():
            return tree_sum(len(blocks), lambda i: multiply(x[:, cuts[i] : cuts[i + 1]], blocks[i].T))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, read = ctx.saved_tensors
        grad = grad.to(x.dtype)
        grad_x = multiply(grad, read) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(x, grad, ctx.groups) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None, None


def block_sums(x: torch.Tensor, cuts: Sequence[int] | None) -> torch.Tensor:
    """[N, V] -> [N], over blocks of columns; without cuts all at once."""
    if cuts is None:
        return x.sum(-1)
    return tree_sum(len(cuts) - 1, lambda i: row_sum(x[:, cuts[i] : cuts[i + 1]]))
