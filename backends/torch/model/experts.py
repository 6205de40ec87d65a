"""Mixture-of-experts layers: each token goes to the experts that its router chose, on whichever rank they are.

In: an experts module of transformers whose weights are this rank's pieces, and the ranks that divide the experts of a
layer among themselves (`ep`) or divide each of them (`tp`). Out: the same module, whose forward communicates.

Under ep, tokens are sent to the ranks of their experts and the results are sent back (GShard, Lepikhin et al. 2020,
arXiv:2006.16668); router weights are applied on the token's own rank, so that routers need no communication. Under tp
each rank computes a part of every expert, and the parts are summed. In an invariant model the parts of every row are
summed in one tree before rows return to their tokens, and the experts of a token are added in the order of its choices:
that is the same under every ep and tp, but under tp a row is sent for each expert of a token.
Invariant: no token is dropped, so results do not depend on the placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.model.collectives import (
    all_to_all,
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
)
from rldsl.backends.torch.model.tree_sums import row_parallel_product
from rldsl.runtime.backend import Axis


def parallelize_experts(module: nn.Module, num_experts: int, tp: Axis, ep: Axis, cuts: Sequence[int] | None = None
                        ) -> None:
    """Give `module` its forward: (tokens [T, H], chosen experts [T, K], their weights [T, K]) -> [T, H]. num_experts:
    of the whole layer. cuts: of the inputs of down projections in an invariant model (`tree_sums.py`)."""
    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if tp.size > 1:
            hidden = copy_to_tensor_parallel_region(hidden, tp)
        if tp.size > 1 and cuts is None:  # else the weights are applied to complete sums
            weights = copy_to_tensor_parallel_region(weights, tp)
        top_k = chosen.shape[1]
        order = chosen.reshape(-1).argsort(stable=True)  # pairs of token and expert, sorted by expert
        counts = count(chosen.reshape(-1), num_experts)
        rows = hidden[order // top_k]
        if torch.is_autocast_enabled(rows.device.type):  # as linear layers do; here before rows are sent
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        def compute(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return _compute(module, rows, counts) if cuts is None else _compute_tree(module, rows, counts, tp, cuts)

        if ep.size > 1:
            dispatcher = TokenDispatcher.of(counts, ep)
            out = dispatcher.combine(compute(dispatcher.dispatch(rows), dispatcher.counts))
        else:
            out = compute(rows, counts)
        out = out * weights.reshape(-1)[order, None]
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        by_choice = out[inverse].unflatten(0, (-1, top_k))
        if cuts is not None:
            complete: torch.Tensor = reduce(torch.add, by_choice.unbind(1))
            return complete.to(hidden.dtype)
        out = by_choice.sum(1).to(hidden.dtype)
        return reduce_from_tensor_parallel_region(out, tp) if tp.size > 1 else out

    module.forward = forward


def count(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[num_experts] int64: how often each number is chosen. `bincount` asks the device for the largest one first."""
    return torch.zeros(num_experts, dtype=torch.long, device=chosen.device).scatter_add_(
        0, chosen, torch.ones_like(chosen))


@dataclass(frozen=True, slots=True)
class TokenDispatcher:
    """How rows reach their experts, in one pass of one layer."""

    ep: Axis                # ranks that divide the experts
    send_counts: list[int]  # rows to each rank
    recv_counts: list[int]  # rows from each rank
    counts: torch.Tensor    # [experts of this rank] rows for each, from all ranks
    order: torch.Tensor     # of received rows (rank by rank, each sorted by expert), so that they are sorted by expert

    @staticmethod
    def of(counts: torch.Tensor, ep: Axis) -> TokenDispatcher:
        """counts: [experts] rows of this rank for each expert; the experts of a rank are consecutive."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=ep.group)
        by_rank = received.view(ep.size, -1)  # [rank, expert of this rank]
        send, recv = torch.stack([counts.view(ep.size, -1).sum(1), by_rank.sum(1)]).tolist()
        experts = torch.arange(by_rank.shape[1], device=counts.device).repeat(ep.size).repeat_interleave(received)
        return TokenDispatcher(ep, send, recv, by_rank.sum(0), experts.argsort(stable=True))

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank, sorted by expert -> those of all ranks for this rank's experts, sorted by expert."""
        return all_to_all(rows, self.send_counts, self.recv_counts, self.ep)[self.order]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `dispatch`."""
        inverse = torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(rows), device=rows.device))
        return all_to_all(rows[inverse], self.recv_counts, self.send_counts, self.ep)


def _compute(module: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows: [N, H] sorted by expert; counts: [experts] rows of each. Returns [N, H]. Without rows nothing is computed,
    and the result still depends on them, so that all ranks take part in the backward pass."""
    up, down = module.gate_up_proj, module.down_proj
    aligned = all(n % 8 == 0 for n in (*up.shape[1:], *down.shape[1:]))  # as the grouped kernel needs it
    if rows.dtype == torch.bfloat16 and aligned and len(rows):
        ends = counts.cumsum(0).to(torch.int32)
        inner = module._apply_gate(F.grouped_mm(rows, up.to(rows.dtype).transpose(1, 2), offs=ends))
        return F.grouped_mm(inner, down.to(rows.dtype).transpose(1, 2), offs=ends)
    sizes = counts.tolist()
    outputs = [F.linear(module._apply_gate(F.linear(x, a)), b)
               for x, a, b, size in zip(rows.split(sizes), up.unbind(), down.unbind(), sizes, strict=True) if size]
    return torch.cat(outputs) if outputs else rows


def _compute_tree(module: Any, rows: torch.Tensor, counts: torch.Tensor, tp: Axis, cuts: Sequence[int]
                  ) -> torch.Tensor:
    """`_compute`, summed over tp, for an invariant model."""
    up, down, sizes = module.gate_up_proj, module.down_proj, counts.tolist()
    outputs = [row_parallel_product(module._apply_gate(F.linear(x, a)), b, cuts)
               for x, a, b, size in zip(rows.split(sizes), up.unbind(), down.unbind(), sizes, strict=True) if size]
    if not outputs:
        return rows
    out = torch.cat(outputs)
    return (reduce_from_tensor_parallel_region(out, tp, tree=True) if tp.size > 1 else out).to(rows.dtype)
