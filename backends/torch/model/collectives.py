"""Rows of several ranks as one tensor and back, with gradients.

In: this rank's rows, as many as every other rank of an axis has. Out: the rows of all, rank after rank; or this rank's
rows of a sum. Conjugate pairs: a gather whose result each rank uses for itself sums gradients back to the owner of a
row; a gather whose result all ranks use alike gives each rank its own part of a gradient that all have.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rldsl.runtime.backend import Axis


def gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[n, ...] -> [size * n, ...]."""
    found = x.new_empty(axis.size, *x.shape)
    dist.all_gather(list(found.unbind()), x.contiguous(), group=axis.group)
    return found.flatten(0, 1)


def scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[size * n, ...] -> [n, ...] of the sum over all ranks."""
    parts = list(x.contiguous().unflatten(0, (axis.size, -1)).unbind())
    found = torch.empty_like(parts[0])
    dist.reduce_scatter(found, parts, group=axis.group)
    return found


class GatherApart(torch.autograd.Function):
    """Gather; each rank goes on in its own way, so gradients are summed."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return gather(x, axis)

    @staticmethod
    def backward(ctx, slope):
        return scatter(slope, ctx.axis), None


class GatherAlike(torch.autograd.Function):
    """Gather; all ranks go on alike, so each has the whole gradient and keeps its part."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return gather(x, axis)

    @staticmethod
    def backward(ctx, slope):
        return slope.unflatten(0, (ctx.axis.size, -1))[ctx.axis.index], None


class SumApart(torch.autograd.Function):
    """This rank's rows of the sum of what all ranks have."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return scatter(x, axis)

    @staticmethod
    def backward(ctx, slope):
        return gather(slope, ctx.axis), None


class PartOf(torch.autograd.Function):
    """This rank's rows of what all ranks have alike; the opposite of `GatherAlike`."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.unflatten(0, (axis.size, -1))[axis.index].clone()

    @staticmethod
    def backward(ctx, slope):
        return gather(slope, ctx.axis), None
