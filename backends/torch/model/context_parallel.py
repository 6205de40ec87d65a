"""Context parallelism: the ranks of a cp group divide the tokens of each sequence.

In: lengths of packed sequences, and the group. Out: `ContextParallelAttention`, the attention of this rank's tokens,
which reaches the keys and values of all ranks.

A sequence is cut into 2 * cp chunks of nearly equal length, and rank i has the chunks i and 2 * cp - 1 - i, which
balances causal work (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Keys and values are all-gathered, not passed
round a ring: with grouped-query attention they are small, and only those that come before a query are read. Chunks may
be empty, so a sequence may be of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels.attention_kernels import has_varlen_kernel, varlen_attention
from rldsl.backends.torch.model.attention import Scores, masked_attention
from rldsl.backends.torch.model.collectives import gather_from_sequence_parallel_region
from rldsl.backends.torch.model.sequences import DividedSequences
from rldsl.runtime.backend import Axis
from rldsl.runtime.store import offsets_within


@dataclass(frozen=True, slots=True)
class Partition:
    """How N items are divided over the ranks of an axis."""

    axis: Axis                    # the ranks
    own_items: torch.Tensor       # [n] the items of this rank, ascending
    width: int                    # the most items of a rank, at least 1; other ranks pad to it with zeros
    local_index: torch.Tensor     # [N] the index of an item among those of its rank
    gathered_index: torch.Tensor  # [N] the index of an item after an all-gather of all ranks' padded items

    @staticmethod
    def of(owner: torch.Tensor, axis: Axis) -> Partition:
        """owner: [N] the rank of the axis that has each item."""
        counts = owner.bincount(minlength=axis.size)
        width = max(1, int(counts.max()))
        local = torch.empty_like(owner)
        local[owner.argsort(stable=True)] = offsets_within(counts)
        return Partition(axis, (owner == axis.index).nonzero()[:, 0], width, local, owner * width + local)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [width, ...]."""
        return x if len(x) == self.width else torch.cat([x, x.new_zeros(self.width - len(x), *x.shape[1:])])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [N, ...] on all ranks, which all compute the same with it."""
        return gather_from_sequence_parallel_region(
            self.pad(x), self.axis, tensor_parallel_output_grad=False)[self.gathered_index]


class ContextParallelAttention(DividedSequences):
    """Causal attention of this rank's tokens of S packed sequences.

    A *segment* is a chunk of a sequence on this rank, 2 S in all: its queries see the keys from the start of the
    sequence to the chunk's end."""

    owner: torch.Tensor             # [T] the rank of cp that has each token of the complete row
    partition: Partition            # of the complete row
    positions: torch.Tensor         # [width] of this rank's tokens in their sequences
    query_lens: torch.Tensor        # [2 S] tokens of each segment
    key_lens: torch.Tensor          # [2 S] keys that its last query sees
    key_index: torch.Tensor         # [sum(key_lens)] the indices of these keys among the gathered ones
    max_seqlen: tuple[int, int]     # the most queries and the most keys of a segment
    query_offsets: torch.Tensor     # [2 S] position of a segment's first query in its sequence

    def __init__(self, lengths: torch.Tensor, cp: Axis):
        """lengths: [S] int64, of the complete sequences."""
        pieces, at = 2 * cp.size, offsets_within(lengths)
        sequence = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
        chunk = ((at + 1) * pieces - 1) // lengths[sequence]
        self.owner = torch.minimum(chunk, pieces - 1 - chunk)
        self.partition = Partition.of(self.owner, cp)
        self.positions = self.partition.pad(at[self.partition.own_items])

        own_chunks = torch.tensor([cp.index, pieces - 1 - cp.index], device=lengths.device)
        starts, ends = (((own_chunks + i) * lengths[:, None] // pieces).flatten() for i in (0, 1))  # [2 S]
        self.query_lens = ends - starts
        self.key_lens = torch.where(self.query_lens > 0, ends, 0)
        sequence_starts = (lengths.cumsum(0) - lengths).repeat_interleave(2)
        keys = sequence_starts.repeat_interleave(self.key_lens) + offsets_within(self.key_lens)
        self.key_index = self.partition.gathered_index[keys]
        self.max_seqlen = max(1, int(self.query_lens.max())), max(1, int(self.key_lens.max()))
        self.query_offsets = starts

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """q: [H, width, D]; k: [K, width, D]; v: [K, width, E]. Returns [width, H, E]. See `PackedAttention.attend`."""
        both = torch.cat([k.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)], 1)  # one message instead of two
        visible = gather_from_sequence_parallel_region(
            both, self.partition.axis, tensor_parallel_output_grad=True)[self.key_index]
        k, v = (part.unflatten(1, (x.shape[0], -1)) for part, x in zip(
            visible.split([x.shape[0] * x.shape[2] for x in (k, v)], 1), (k, v), strict=True))
        count = self.partition.own_items.numel()
        q = q.transpose(0, 1)[:count]
        if has_varlen_kernel(q) and scores.plain and q.shape[-1] == v.shape[-1] and count:
            return self.partition.pad(self._fused(q, k, v, scores.scale, scores.window))
        return self.partition.pad(self.attend_padded(q, k, v, scores))

    def attend_padded(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """All segments as one padded batch. q: [n, H, D]; k: [R, K, D]; v: [R, K, E]. Returns [n, H, E]."""
        max_queries, max_keys = self.max_seqlen
        at = self.query_offsets[:, None, None] + torch.arange(max_queries, device=q.device)[:, None]
        mask = scores.visible(at, torch.arange(max_keys, device=q.device))
        query_cells, key_cells = _cells(self.query_lens, max_queries), _cells(self.key_lens, max_keys)
        out = masked_attention(
            _to_batch(q, query_cells, len(self.query_lens), max_queries),
            _to_batch(k, key_cells, len(self.key_lens), max_keys),
            _to_batch(v, key_cells, len(self.key_lens), max_keys), mask[:, None], scores)
        return out.transpose(1, 2).flatten(0, 1)[query_cells]

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
               ) -> torch.Tensor:
        """These kernels align the last query of a segment with its last key, as segments need it."""
        cu_queries, cu_keys = (F.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (self.query_lens, self.key_lens))
        return varlen_attention(q, k, v, (cu_queries, cu_keys), self.max_seqlen, scale, window)


def _cells(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """[sum(lengths)] the cells of the tokens of packed segments in a batch of `width` columns."""
    rows = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    return rows * width + offsets_within(lengths)


def _to_batch(x: torch.Tensor, cells: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """[n, heads, D] -> [count, heads, width, D]."""
    batch: torch.Tensor = x.new_zeros(count * width, *x.shape[1:]).index_copy(0, cells, x).unflatten(0, (count, width))
    return batch.transpose(1, 2)
