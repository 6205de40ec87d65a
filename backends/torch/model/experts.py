"""Mixture-of-experts layers: each token goes to the experts that its router chose, wherever they are.

In: an experts module of transformers whose weights are this rank's pieces, and the ranks that share the experts of a
layer (`ep`) or divide each of them (`tp`). Out: the same module, whose forward communicates. With ep, tokens travel to
the ranks of their experts and what these make of them travels back (Lepikhin et al. 2020, arXiv:2006.16668); weights of
the router are applied where the token is at home, so that routers need no communication. With tp each rank computes a
part of every expert, and the parts are summed. No token is dropped, so that results do not depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rldsl.backends.torch.model.tensor_parallel import IntoDivided, OutOfDivided
from torch import nn

from rldsl.runtime.backend import Axis


def divide_experts(module: nn.Module, count: int, tp: Axis, ep: Axis) -> None:
    """Give `module` its forward: (tokens [T, H], chosen experts [T, K], their weights [T, K]) -> [T, H]. count: experts
    of the layer."""
    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if tp.size > 1:
            hidden, weights = IntoDivided.apply(hidden, tp), IntoDivided.apply(weights, tp)
        each = chosen.shape[1]
        order = chosen.reshape(-1).argsort(stable=True)  # pairs of token and expert, by expert
        counts = chosen.reshape(-1).bincount(minlength=count)
        rows = hidden[order // each]
        if torch.is_autocast_enabled(rows.device.type):  # as linear layers do; here before they travel
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        if ep.size > 1:
            route = Route.of(counts, ep)
            made = route.back(_compute(module, route.there(rows), route.counts))
        else:
            made = _compute(module, rows, counts)
        made = made * weights.reshape(-1)[order, None]
        out = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        found = made[out].unflatten(0, (-1, each)).sum(1).to(hidden.dtype)
        return OutOfDivided.apply(found, tp) if tp.size > 1 else found

    module.forward = forward


@dataclass(frozen=True, slots=True)
class Route:
    """How the rows of this rank and those of the others reach their experts. sent, received: rows to and from each
    rank. counts: [experts of this rank] rows for each, of all ranks. order: of received rows (rank after rank, each by
    expert), so that they are by expert."""

    ep: Axis
    sent: list[int]
    received: list[int]
    counts: torch.Tensor
    order: torch.Tensor

    @staticmethod
    def of(counts: torch.Tensor, ep: Axis) -> Route:
        """counts: [experts] rows of this rank for each; the experts of a rank are neighbours."""
        told = torch.empty_like(counts)
        dist.all_to_all_single(told, counts.contiguous(), group=ep.group)
        here = told.view(ep.size, -1)  # [rank, expert of this rank]
        sent, received = torch.stack([counts.view(ep.size, -1).sum(1), here.sum(1)]).tolist()
        experts = torch.arange(here.shape[1], device=counts.device).repeat(ep.size).repeat_interleave(told)
        return Route(ep, sent, received, here.sum(0), experts.argsort(stable=True))

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank, by expert -> those of all ranks for the experts of this one, by expert."""
        return Exchange.apply(rows, self.sent, self.received, self.ep)[self.order]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """The other way."""
        apart = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(rows), device=rows.device))
        return Exchange.apply(rows[apart], self.received, self.sent, self.ep)


class Exchange(torch.autograd.Function):
    """Rows to every rank, so many to each, and from every rank; gradients go the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received, ep):
        ctx.sent, ctx.received, ctx.ep = sent, received, ep
        return _exchange(rows, sent, received, ep)

    @staticmethod
    def backward(ctx, slope):
        return _exchange(slope, ctx.received, ctx.sent, ctx.ep), None, None, None


def _exchange(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], ep: Axis) -> torch.Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=ep.group)
    return found


def _compute(module: nn.Module, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows: [N, H] by expert; counts: [experts] of them for each. [N, H]. Without rows nothing is computed, and the
    result still hangs on them, so that all ranks take part in the backward pass."""
    up, down = module.gate_up_proj, module.down_proj
    even = all(n % 8 == 0 for n in (*up.shape[1:], *down.shape[1:]))  # what the kernel can read
    if rows.dtype == torch.bfloat16 and even and len(rows):
        ends = counts.cumsum(0).to(torch.int32)
        inner = module._apply_gate(F.grouped_mm(rows, up.to(rows.dtype).transpose(1, 2), offs=ends))
        return F.grouped_mm(inner, down.to(rows.dtype).transpose(1, 2), offs=ends)
    sizes = counts.tolist()
    made = [F.linear(module._apply_gate(F.linear(x, a)), b)
            for x, a, b, size in zip(rows.split(sizes), up.unbind(), down.unbind(), sizes) if size]
    return torch.cat(made) if made else rows
