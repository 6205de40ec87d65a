"""Collectives with gradients, named as in Megatron-LM's `tensor_parallel/mappings.py`.

In: a tensor of this rank, and the axis (communicator) to use. Out: the result, which autograd can differentiate. Each
function comes with its conjugate: what one does forward, another does backward.

Tensor-parallel region (weights divided over the axis; Shoeybi et al. 2019, arXiv:1909.08053, section 3):
`copy_to_...` identity / all-reduce, `reduce_from_...` all-reduce / identity.
Sequence-parallel region (tokens, dimension 0, divided over the axis; Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2; the ranks of cp divide tokens too): `gather_from_...` all-gather / reduce-scatter or slice, `scatter_to_...`
slice / all-gather, `reduce_scatter_to_...` reduce-scatter / all-gather. Every rank must have the same number of rows.

With `tree` a sum over ranks is a binary tree over their order, the same on all of them (`tree_sums.py`): parts are
exchanged, added locally and, for an all-reduce, gathered, which moves the bytes of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.runtime import collectives
from rldsl.runtime.backend import Axis


def copy_to_tensor_parallel_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The input of column-parallel layers: x itself; its gradient is summed over the axis."""
    out: torch.Tensor = _CopyToRegion.apply(x, axis)
    return out


def reduce_from_tensor_parallel_region(x: torch.Tensor, axis: Axis, tree: bool = False) -> torch.Tensor:
    """The output of row-parallel layers: the sum over the axis. May overwrite x."""
    out: torch.Tensor = _ReduceFromRegion.apply(x, axis, tree)
    return out


def gather_from_tensor_parallel_region(x: torch.Tensor, axis: Axis, width: int) -> torch.Tensor:
    """[..., columns of this rank] -> [..., width], the columns of all ranks in order, for what all ranks compute
    alike with them. Rank i has the columns from i * width // size on."""
    out: torch.Tensor = _GatherColumns.apply(x, axis, width)
    return out


def scatter_to_tensor_parallel_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[..., width], equal on all ranks -> this rank's columns, from i * width // size on."""
    out: torch.Tensor = _SliceColumns.apply(x, axis)
    return out


def gather_from_sequence_parallel_region(x: torch.Tensor, axis: Axis, *, tensor_parallel_output_grad: bool
                                         ) -> torch.Tensor:
    """[n, ...] -> [size * n, ...], the rows of all ranks in order.

    tensor_parallel_output_grad: whether each rank computes something different with the result, so that gradients are
    summed back to the owner of a row. If not, all ranks compute the same and each has the whole gradient already."""
    function = _GatherReduceScatter if tensor_parallel_output_grad else _GatherSlice
    out: torch.Tensor = function.apply(x, axis)
    return out


def scatter_to_sequence_parallel_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[size * n, ...], equal on all ranks -> this rank's [n, ...]."""
    out: torch.Tensor = _Slice.apply(x, axis)
    return out


def reduce_scatter_to_sequence_parallel_region(x: torch.Tensor, axis: Axis, tree: bool = False) -> torch.Tensor:
    """[size * n, ...] -> this rank's [n, ...] of the sum over the axis."""
    out: torch.Tensor = _ReduceScatter.apply(x, axis, tree)
    return out


def all_to_all(rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], axis: Axis) -> torch.Tensor:
    """[sum(send_counts), ...] -> [sum(recv_counts), ...]: rows to and from each rank, in rank order."""
    out: torch.Tensor = _AllToAll.apply(rows, send_counts, recv_counts, axis)
    return out


def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[n, ...] -> [size * n, ...]. No gradient."""
    return collectives.all_gather(x, axis.group).flatten(0, 1)


def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[size * n, ...] -> [n, ...] of the sum over the axis. No gradient."""
    return collectives.reduce_scatter(x.unflatten(0, (axis.size, -1)), axis.group)


def tree_reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[size * n, ...] -> [n, ...] of the tree sum over the axis. No gradient."""
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=axis.group)
    return tree_of(parts.unflatten(0, (axis.size, -1)))


def tree_all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tree sum over the axis. No gradient. Two ranks gather whole tensors, in one message instead of two and with
    as many bytes."""
    if axis.size == 1:
        return x
    if axis.size == 2:
        return tree_of(all_gather(x[None], axis))
    flat = F.pad(x.flatten(), (0, -x.numel() % axis.size))
    return all_gather(tree_reduce_scatter(flat, axis), axis)[: x.numel()].view(x.shape)


def tree_of(parts: torch.Tensor) -> torch.Tensor:
    """[parts, ...] -> [...], their sum as a binary tree. Their number is a power of two."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def _own_rows(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    rows: torch.Tensor = x.unflatten(0, (axis.size, -1))[axis.index]
    return rows


def _exchange(rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], axis: Axis) -> torch.Tensor:
    out = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), list(recv_counts), list(send_counts), group=axis.group)
    return out


class _CopyToRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        collectives.all_reduce(grad, group=ctx.axis.group)
        return grad, None


class _ReduceFromRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, tree: bool) -> torch.Tensor:
        if tree:
            return tree_all_reduce(x, axis)
        total = x.contiguous()
        collectives.all_reduce(total, group=axis.group)
        if total is x:
            ctx.mark_dirty(x)  # else a family that adds to the result in place could not
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


def _columns(width: int, axis: Axis, index: int) -> slice:
    return slice(index * width // axis.size, (index + 1) * width // axis.size)


def _all_columns(x: torch.Tensor, axis: Axis, width: int) -> torch.Tensor:
    """Ranks may have different numbers of columns: fewer are padded."""
    ends = [_columns(width, axis, i) for i in range(axis.size)]
    most = max(s.stop - s.start for s in ends)
    parts = all_gather(F.pad(x, (0, most - x.shape[-1])).contiguous()[None], axis)
    return torch.cat([part[..., : s.stop - s.start] for part, s in zip(parts, ends, strict=True)], -1)


class _GatherColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, width: int) -> torch.Tensor:
        ctx.at = _columns(width, axis, axis.index)
        return _all_columns(x, axis, width)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[..., ctx.at].contiguous(), None, None


class _SliceColumns(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis, ctx.width = axis, x.shape[-1]
        return x[..., _columns(ctx.width, axis, axis.index)].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_columns(grad, ctx.axis, ctx.width), None


class _GatherReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(grad, ctx.axis), None


class _GatherSlice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_rows(grad, ctx.axis), None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _own_rows(x, axis).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(grad, ctx.axis), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, tree: bool) -> torch.Tensor:
        ctx.axis = axis
        return (tree_reduce_scatter if tree else reduce_scatter)(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.axis), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], axis: Axis
                ) -> torch.Tensor:
        ctx.send_counts, ctx.recv_counts, ctx.axis = send_counts, recv_counts, axis
        return _exchange(rows, send_counts, recv_counts, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grad, ctx.recv_counts, ctx.send_counts, ctx.axis), None, None, None
