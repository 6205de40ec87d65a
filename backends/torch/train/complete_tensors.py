"""Complete tensors for optimizers whose updates depend on all of a parameter.

In: this rank's part of a tensor that is divided as a parameter is, by tp, by ep and by `zero`. Out: the complete one,
on every rank that has a part. Only copies: the result has the same bits on each of these ranks.
Invariant: all ranks along dp and tp that have the parameter call in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist

from rldsl.plan.model import Layout, ParamSpec
from rldsl.runtime.backend import SINGLE_RANK, Axes, Axis
from rldsl.runtime.collectives import all_gather, all_reduce
from rldsl.sharding.boxes import Box, Parameter, Piece, local_slice, pieces_at, pieces_by_pair, slices, volume


class CompleteTensors:
    """Gathers tensors of one rank under one layout."""

    def __init__(self, layout: Layout, axes: Axes):
        self.layout, self.axes = layout, axes

    def is_divided(self, spec: ParamSpec) -> bool:
        """Whether some rank has only a part of a parameter. Equal on all ranks."""
        whole = prod(spec.shape)
        return any(sum(volume(p.box) for p in held) != whole for held in pieces_by_pair(spec, self.layout).values())

    def gather(self, parameter: Parameter, pieces: Sequence[Piece], local: torch.Tensor) -> torch.Tensor:
        """The complete tensor. pieces: what this rank has of the parameter, in `local`."""
        spec, tp = parameter.spec, self.axes.tp
        along_dp, index = self._axis_along_dp(spec)
        mine = [local[local_slice(p, p.box, parameter.dim)].reshape(-1) for p in pieces]
        row = _gather_ragged(torch.cat(mine) if mine else local.reshape(-1),
                             [_numel(self._boxes(spec, tp.index, j)) for j in index], along_dp)
        boxes = [[b for j in index for b in self._boxes(spec, i, j)] for i in range(tp.size)]
        if spec.split is not None:
            row = _gather_ragged(row, [_numel(found) for found in boxes], tp)
            ordered = [box for found in boxes for box in found]
        else:
            ordered = boxes[tp.index]
        complete = local.new_empty(spec.shape)
        for box, part in zip(ordered, row.split([volume(box) for box in ordered]), strict=True):
            complete[slices(box)] = part.view([stop - start for start, stop in box])
        return complete

    def maximum(self, spec: ParamSpec, numbers: torch.Tensor) -> None:
        """Replace each number by the largest among the ranks that have a part of a parameter."""
        for axis in (self._axis_along_dp(spec)[0], self.axes.tp):
            if axis.size > 1 and self.is_divided(spec):
                all_reduce(numbers, dist.ReduceOp.MAX, axis.group)

    def read_part(self, parameter: Parameter, pieces: Sequence[Piece], complete: torch.Tensor,
                  local: torch.Tensor) -> None:
        """Copy this rank's part of a complete tensor into `local`."""
        for p in pieces:
            local[local_slice(p, p.box, parameter.dim)] = complete[slices(p.box)]

    def write_part(self, parameter: Parameter, pieces: Sequence[Piece], local: torch.Tensor,
                   complete: torch.Tensor) -> None:
        """Copy `local` into this rank's part of a complete tensor."""
        for p in pieces:
            complete[slices(p.box)] = local[local_slice(p, p.box, parameter.dim)]

    def _axis_along_dp(self, spec: ParamSpec) -> tuple[Axis, Sequence[tuple[int, int]]]:
        """The ranks along dp that have the parts of a parameter, and the (expert coordinate, zero shard) of each."""
        layout, ep = self.layout, self.layout.ep
        if layout.zero:
            return self.axes.dp, [(j % ep, j // ep) for j in range(layout.dp)]
        if ep > 1 and spec.experts:
            return self.axes.ep, [(j, 0) for j in range(ep)]
        return SINGLE_RANK, [(self.axes.ep.index, 0)]

    def _boxes(self, spec: ParamSpec, tp_rank: int, at: tuple[int, int]) -> list[Box]:
        expert, zero_shard = at
        return [p.box for p in pieces_at(spec, self.layout, expert * self.layout.tp + tp_rank, zero_shard)]


def _numel(boxes: Sequence[Box]) -> int:
    return sum(map(volume, boxes))


def _gather_ragged(local: torch.Tensor, sizes: Sequence[int], axis: Axis) -> torch.Tensor:
    """The tensors of all ranks of an axis, one after the other. sizes: elements on each."""
    if axis.size == 1:
        return local
    padded = local.new_zeros(max(sizes))
    padded[: local.numel()] = local
    return torch.cat([part[:n] for part, n in zip(all_gather(padded, axis.group), sizes, strict=True)])
