"""Mixture-of-experts layers: each token goes to the experts that its router chose, on whichever rank they are.

In: an experts module of transformers whose weights are this rank's pieces, and the ranks that divide the experts of a
layer among themselves (`ep`) or divide each of them (`tp`). Out: the same module, whose forward communicates.

Under ep, tokens are sent to the ranks of their experts and the results are sent back (GShard, Lepikhin et al. 2020,
arXiv:2006.16668); router weights are applied on the token's own rank, so that routers need no communication. Under tp
each rank computes a part of every expert, and the parts are summed. In an invariant model the parts of every row are
summed in one tree before rows return to their tokens, and the experts of a token are added in the order of its choices:
that is the same under every ep and tp, but under tp a row is sent for each expert of a token.
Invariant: no token is dropped, so results do not depend on the placement.

How many rows an expert gets is read on the host, and under ep it is sent, so a trace of operators cannot hold what is
inside. On a CPU and without gradients, as in decoding, it is one opaque call (`kernels/opaque_calls.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rldsl.backends.torch.kernels.opaque_calls import opaque_on_cpu
from rldsl.backends.torch.kernels.row_gathers import inverse_of, reorder, repeat_and_reorder
from rldsl.backends.torch.model.collectives import (
    all_to_all,
    copy_to_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
)
from rldsl.backends.torch.model.gradient_sums import Leaves, expert_products, with_gradient_apart
from rldsl.backends.torch.model.invariant_products import product
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.tree_sums import row_parallel_product
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies
from rldsl.runtime.backend import Axis


def parallelize_experts(module: Any, num_experts: int, tp: Axis, ep: Axis, cuts: Sequence[int] | None = None,
                        ordered: OrderedExperts | None = None, copies: WeightCopies = NO_COPIES) -> None:
    """Give `module` its forward: (tokens [T, H], chosen experts [T, K], their weights [T, K]) -> [T, H]. num_experts:
    of the whole layer. cuts: of the inputs of down projections in an invariant model (`tree_sums.py`). ordered: if
    gradients have one order. copies: of the weights of an invariant model."""
    def run(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if tp.size > 1 and ordered is None:
            hidden = copy_to_tensor_parallel_region(hidden, tp)
        if tp.size > 1 and cuts is None:  # else the weights are applied to complete sums
            weights = copy_to_tensor_parallel_region(weights, tp)
        top_k = chosen.shape[1]
        order = chosen.reshape(-1).argsort(stable=True)  # pairs of token and expert, sorted by expert
        groups = ordered.row_groups() if ordered is not None and torch.is_grad_enabled() else ()
        counts = _rows_by_group(chosen, num_experts, groups)
        inverse = inverse_of(order)
        rows = repeat_and_reorder(hidden, top_k, order, inverse)
        if torch.is_autocast_enabled(rows.device.type):  # as linear layers do; here before rows are sent
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))

        def compute(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            if cuts is None:
                return _compute(module, rows, counts.sum(1))
            return _compute_tree(module.gate_up_proj, module.down_proj, read(rows.dtype), module, rows, counts, groups,
                                 tp, cuts, ordered)

        def read(dtype: torch.dtype) -> Weights:
            return copies.cast(module.gate_up_proj, dtype), copies.cast(module.down_proj, dtype)

        grads = ordered.source_grads() if ordered is not None and groups else None
        if grads is not None and cuts is not None:
            out = _of_each_source(module, read(rows.dtype), rows, counts, groups, tp, ep, cuts, ordered, grads)
        elif ep.size > 1:
            dispatcher = TokenDispatcher.of(counts, ep)
            out = dispatcher.combine(compute(dispatcher.dispatch(rows), dispatcher.counts))
        else:
            out = compute(rows, counts)
        out = out * reorder(weights.reshape(-1), order, inverse)[:, None]
        by_choice = reorder(out, inverse, order).unflatten(0, (-1, top_k))
        if cuts is not None:
            complete: torch.Tensor = reduce(torch.add, by_choice.unbind(1))
            return complete.to(hidden.dtype)
        out = by_choice.sum(1).to(hidden.dtype)
        return reduce_from_tensor_parallel_region(out, tp) if tp.size > 1 else out

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return opaque_on_cpu(run, hidden, chosen, weights)

    module.forward = forward


def _bincount(chosen: torch.Tensor, size: int) -> torch.Tensor:
    """[size] int64: how often each number is chosen. torch's `bincount` makes the host wait for the largest one."""
    return torch.zeros(size, dtype=torch.long, device=chosen.device).scatter_add_(
        0, chosen, torch.ones_like(chosen))


Weights = tuple[torch.Tensor, torch.Tensor]  # of up and of down projections
SourceGrads = tuple[torch.Tensor, torch.Tensor]  # the same of their gradients, [ep, ...] each


@dataclass(frozen=True, slots=True)
class OrderedExperts:
    """Of a layer whose gradients have one order of sums (`gradient_sums.py`)."""

    leaves: Leaves  # of the outputs of up projections
    row_groups: Callable[[], RowGroups]  # those of the pass under way, by which gradients are summed
    # Where the gradients of this rank's experts are added, those of tokens of each rank of ep apart: these belong to
    # different leaves of the minibatch. None: nowhere, since ep is 1 or nothing is trained
    source_grads: Callable[[], SourceGrads | None]


@dataclass(frozen=True, slots=True)
class TokenDispatcher:
    """How rows reach their experts, in one pass of one layer."""

    ep: Axis                # ranks that divide the experts
    send_counts: list[int]  # rows to each rank
    recv_counts: list[int]  # rows from each rank
    counts: torch.Tensor    # [experts of this rank, groups] rows for each, from all ranks
    by_rank: torch.Tensor   # [ep, experts of this rank, groups] the same from each rank
    order: torch.Tensor     # of received rows (rank by rank, each sorted by expert), so that they are sorted by expert
    inverse: torch.Tensor   # of `order`

    @staticmethod
    def of(counts: torch.Tensor, ep: Axis) -> TokenDispatcher:
        """counts: [experts, groups] rows of this rank for each expert, in each group of tokens; the experts of a rank
        are consecutive."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=ep.group)
        by_rank = received.unflatten(0, (ep.size, -1))
        send, recv = torch.stack([counts.view(ep.size, -1).sum(1), by_rank.flatten(1).sum(1)]).tolist()
        experts = torch.arange(by_rank.shape[1], device=counts.device).repeat(ep.size)
        experts = experts.repeat_interleave(received.sum(1), output_size=sum(recv))
        order = experts.argsort(stable=True)
        return TokenDispatcher(ep, send, recv, by_rank.sum(0), by_rank, order, inverse_of(order))

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank, sorted by expert -> those of all ranks for this rank's experts, sorted by expert."""
        return reorder(self.exchange(rows), self.order, self.inverse)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """`dispatch`, but sorted by rank, then by expert."""
        return all_to_all(rows, self.send_counts, self.recv_counts, self.ep)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `dispatch`."""
        return self.exchange_back(reorder(rows, self.inverse, self.order))

    def exchange_back(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `exchange`."""
        return all_to_all(rows, self.recv_counts, self.send_counts, self.ep)


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


def _of_each_source(module: Any, read: Weights, rows: torch.Tensor, counts: torch.Tensor, groups: RowGroups, tp: Axis,
                    ep: Axis, cuts: Sequence[int], ordered: OrderedExperts | None, grads: SourceGrads) -> torch.Tensor:
    """Rows of this rank, sorted by expert, to their experts and back; the rows of each rank are computed apart."""
    dispatcher = TokenDispatcher.of(counts, ep)
    received = dispatcher.exchange(rows).split(dispatcher.recv_counts)
    outputs = []
    for source, part in enumerate(received):
        up, down = (with_gradient_apart(w, g[source]) for w, g in
                    zip((module.gate_up_proj, module.down_proj), grads, strict=True))
        outputs.append(_compute_tree(up, down, read, module, part, dispatcher.by_rank[source], groups, tp, cuts,
                                     ordered))
    return dispatcher.exchange_back(torch.cat(outputs))


def _rows_by_group(chosen: torch.Tensor, num_experts: int, groups: RowGroups) -> torch.Tensor:
    """[experts, groups of all leaves]: rows. chosen: [T, K], of tokens in groups. Without groups all are one."""
    sizes = [size for leaf in groups for size in leaf] or [len(chosen)]
    if len(sizes) > 1:
        each = torch.tensor(sizes, device=chosen.device)
        group = torch.arange(len(sizes), device=chosen.device).repeat_interleave(each, output_size=len(chosen))
        chosen = chosen * len(sizes) + group[:, None]
    return _bincount(chosen.reshape(-1), num_experts * len(sizes)).view(num_experts, len(sizes))


def _compute_tree(up: torch.Tensor, down: torch.Tensor, read: Weights, module: Any, rows: torch.Tensor,
                  counts: torch.Tensor, groups: RowGroups, tp: Axis, cuts: Sequence[int],
                  ordered: OrderedExperts | None) -> torch.Tensor:
    """`_compute`, summed over tp, for an invariant model. read: up and down, as they multiply. counts: [experts, groups
    of all leaves] rows of each expert. groups: of the tokens; on other ranks there are as many."""
    if not len(rows):
        return rows
    of_each: list[RowGroups] = counts.unflatten(1, (max(len(groups), 1), -1)).tolist()
    sizes: list[int] = counts.sum(1).tolist()
    inner = expert_products(rows, up, read[0], of_each, ordered.leaves, tp).split(sizes) if ordered is not None else \
        [product(x, a.T, read=b.T) for x, a, b in zip(rows.split(sizes), up.unbind(), read[0].unbind(), strict=True)]
    out = torch.cat([row_parallel_product(module._apply_gate(x), a, cuts, groups=each, read=b) for x, a, b, each in
                     zip(inner, down.unbind(), read[1].unbind(), of_each, strict=True) if len(x)])
    return (reduce_from_tensor_parallel_region(out, tp, tree=True) if tp.size > 1 else out).to(rows.dtype)
