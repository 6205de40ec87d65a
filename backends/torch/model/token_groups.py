"""The tokens of a pass in groups, over which gradients are summed in one order under every cp (`invariant=training`).

In: lengths of packed sequences, and the ranks of cp. Out: what `context_parallel.py` gives, for `TOKEN_GROUPS` ranks
of which each real one has an equal run. A sequence is always cut as if there were `TOKEN_GROUPS` ranks, and the rows
of a group are those of such a rank, one group after the other and padded to one width. So each sum over tokens is one
over the rows of groups and then one over groups, and one rank makes the additions of several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.model.attention import Scores
from rldsl.backends.torch.model.collectives import (
    all_gather,
    gather_from_sequence_parallel_region,
    tree_of,
    tree_reduce_scatter,
)
from rldsl.backends.torch.model.context_parallel import ContextParallelAttention, Partition
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.segment_buckets import Segment, SegmentBuckets
from rldsl.backends.torch.model.sequences import DividedSequences
from rldsl.runtime.backend import Axis
from rldsl.sharding.gradient_leaves import TOKEN_GROUPS


def groups_of_rank(cp: Axis) -> tuple[Axis, ...]:
    """Those of this rank, as places among as many ranks as there are groups."""
    ranks, each = tuple(range(TOKEN_GROUPS)), TOKEN_GROUPS // cp.size
    return tuple(Axis(ranks, g, None) for g in range(cp.index * each, (cp.index + 1) * each))


class GroupedPartition:
    """How N items are divided over groups; as `Partition`, for the groups of this rank together."""

    def __init__(self, owner: torch.Tensor, cp: Axis):
        """owner: [N] the group of each item."""
        self.cp = cp
        self.groups = [Partition.of(owner, at) for at in groups_of_rank(cp)]
        self.own_items = torch.cat([p.own_items for p in self.groups])
        self.sizes = [len(p.own_items) for p in self.groups]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [groups of this rank * width, ...]."""
        return torch.cat([p.pad(part) for p, part in zip(self.groups, x.split(self.sizes), strict=True)])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [N, ...] on all ranks, which all compute the same with it."""
        padded, order = self.pad(x), self.groups[0].gathered_index
        if self.cp.size > 1:
            padded = gather_from_sequence_parallel_region(padded, self.cp, tensor_parallel_output_grad=False)
        return padded[order]

    def places(self, of: GroupedPartition, items: torch.Tensor) -> torch.Tensor:
        """[n] rows of the padded items of another partition, for this rank's items. items: [N] which of them each of
        these is."""
        first = of.groups[0]
        group = torch.arange(len(self.groups), device=items.device).repeat_interleave(
            torch.tensor(self.sizes, device=items.device))
        return group * first.width + first.local_index[items[self.own_items]]


class GroupedAttention(DividedSequences):
    """Causal attention of the tokens of this rank's groups; see `ContextParallelAttention`. Of one leaf, or of several,
    one after the other in one row (`row_groups.py`)."""

    positions: torch.Tensor  # [rows of this rank] of its tokens in their sequences
    row_groups: RowGroups

    def __init__(self, lengths: torch.Tensor, cp: Axis):
        """lengths: [S] int64, of the complete sequences."""
        self.cp = cp
        self.groups = [ContextParallelAttention(lengths, at) for at in groups_of_rank(cp)]
        self.owner = self.groups[0].owner  # [T] the group of each token of the complete row
        self.partition = GroupedPartition(self.owner, cp)
        self.positions = torch.cat([g.positions for g in self.groups])
        self.row_groups = ((self.groups[0].partition.width,) * len(self.groups),)
        self.segments = [s for i, g in enumerate(self.groups) for s in _segments(g, i)]
        self._buckets: SegmentBuckets | None = None

    @staticmethod
    def of_leaves(leaves: Sequence[GroupedAttention | None]) -> GroupedAttention:
        """The passes of several leaves as one: a power of two of leaves; None: one without rows. No cp divides them."""
        given = [leaf for leaf in leaves if leaf is not None]
        joined, first, none = copy(given[0]), 0, (0,) * len(given[0].groups)
        joined.positions, joined.segments = torch.cat([leaf.positions for leaf in given]), []
        joined.row_groups = [none if leaf is None else leaf.row_groups[0] for leaf in leaves]
        for leaf in given:
            joined.segments += [replace(s, query=s.query + first, keys=s.keys + first) for s in leaf.segments]
            first += len(leaf.positions)
        return joined

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """q: [H, rows, D]; k, v: [K, rows, D]. Returns [rows, H, D]. See `PackedAttention.attend`."""
        if self._buckets is None:
            self._buckets = SegmentBuckets(self.segments, len(self.groups), len(self.positions), q.device)
        both = torch.cat([k.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)], 1)
        seen = _GatherKeys.apply(both, self.cp, len(self.groups))
        return self._buckets.attend(q.transpose(0, 1), seen, (k.shape[0] * k.shape[2], v.shape[0] * v.shape[2]), scores)


def _segments(group: ContextParallelAttention, number: int) -> Iterator[Segment]:
    """number: of the group, among those of this rank."""
    query, keys = number * group.partition.width, group.key_index.cpu()
    each = zip(*(x.tolist() for x in (group.query_lens, group.key_lens, group.query_offsets)), strict=True)
    first = 0
    for queries, visible, start in each:
        if queries:
            yield Segment(number, query, queries, start, keys[first : first + visible])
        query, first = query + queries, first + visible


class _GatherKeys(Function):
    """[rows of this rank, ...] -> those of all groups, once for each group of this rank. The gradients that come from
    the groups are added in a tree, those of other ranks last."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: Axis, count: int) -> tuple[torch.Tensor, ...]:
        ctx.cp = cp
        complete = all_gather(x, cp) if cp.size > 1 else x
        return tuple(complete.view_as(complete) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = tree_of(torch.stack(grads).float())
        total = tree_reduce_scatter(total, ctx.cp) if ctx.cp.size > 1 else total
        return total.to(grads[0].dtype), None, None

