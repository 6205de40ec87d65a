"""Context parallelism: the ranks of a cp group share the tokens of each sequence.

In: lengths of packed sequences, and the group. Out: `Context`, a packing of this rank's tokens whose attention reaches
the keys and values of all. A sequence is cut into 2 * cp chunks of nearly equal length, and rank i has the chunks i and
2 * cp - 1 - i, which balances causal work (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Keys and values are
gathered, not passed round a ring: with grouped-query attention they are few, and only those that come before are read.
Chunks may be empty, so a sequence may be as short as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rldsl.backends.torch.kernels.optional_packages import flash
from rldsl.backends.torch.kernels.varlen_attention import fits, varlen
from rldsl.backends.torch.model.collectives import GatherAlike, GatherApart

from rldsl.runtime.backend import Axis
from rldsl.runtime.store import within


@dataclass(frozen=True, slots=True)
class Portion:
    """What this rank has of N items that are divided over the ranks of an axis.

    mine: [n] the items, ascending. width: the most that a rank has, at least 1; shorter ones are filled up with zeros.
    local: [N] where an item stands among those of its rank; place: [N] where it stands when all are gathered."""

    axis: Axis
    mine: torch.Tensor
    width: int
    local: torch.Tensor
    place: torch.Tensor

    @staticmethod
    def of(owner: torch.Tensor, axis: Axis) -> Portion:
        """owner: [N] which rank of the axis has each item."""
        counts = owner.bincount(minlength=axis.size)
        width = max(1, int(counts.max()))
        local = torch.empty_like(owner)
        local[owner.argsort(stable=True)] = within(counts)
        return Portion(axis, (owner == axis.index).nonzero()[:, 0], width, local, owner * width + local)

    def fill(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [width, ...]."""
        return x if len(x) == self.width else torch.cat([x, x.new_zeros(self.width - len(x), *x.shape[1:])])

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [N, ...] on all, which go on alike."""
        return GatherAlike.apply(self.fill(x), self.axis)[self.place]


class Context:
    """Causal attention of this rank's tokens of S packed sequences. lengths: [S] int64 of the whole sequences.

    tokens: the portion of the whole row that this rank has. positions: [width] in their sequences. A *segment* is a
    chunk of a sequence on this rank: its queries see the keys from the start of the sequence to the chunk's end."""

    def __init__(self, lengths: torch.Tensor, cp: Axis):
        pieces, at = 2 * cp.size, within(lengths)
        sequence = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
        chunk = ((at + 1) * pieces - 1) // lengths[sequence]
        self.owner = torch.minimum(chunk, pieces - 1 - chunk)
        self.tokens = Portion.of(self.owner, cp)
        self.positions = self.tokens.fill(at[self.tokens.mine])

        mine = torch.tensor([cp.index, pieces - 1 - cp.index], device=lengths.device)
        starts, ends = (((mine + i) * lengths[:, None] // pieces).flatten() for i in (0, 1))  # [2S]
        self.queries = ends - starts
        self.keys = torch.where(self.queries > 0, ends, 0)
        begin = (lengths.cumsum(0) - lengths).repeat_interleave(2)
        reach = begin.repeat_interleave(self.keys) + within(self.keys)
        self.reach = self.tokens.place[reach]
        self.longest = max(1, int(self.queries.max())), max(1, int(self.keys.max()))
        self.starts = starts

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """q: [H, width, D]; k, v: [K, width, D]. Returns [width, H, D]."""
        sent = torch.cat([k.transpose(0, 1).flatten(1), v.transpose(0, 1).flatten(1)], 1)
        seen = GatherApart.apply(sent, self.tokens.axis)[self.reach]
        k, v = (part.unflatten(1, (x.shape[0], -1)) for part, x in zip(
            seen.split([x.shape[0] * x.shape[2] for x in (k, v)], 1), (k, v)))
        count = self.tokens.mine.numel()
        q = q.transpose(0, 1)[:count]
        compute = self._fused if fits(q, window) and count else self._grid
        return self.tokens.fill(compute(q, k, v, scale, window))

    def _grid(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
              ) -> torch.Tensor:
        """All segments as one batch, zeros in the gaps. q: [n, H, D]; k, v: [R, K, D]; [n, H, D]."""
        tall, wide = self.longest
        gap = self.starts[:, None, None] + torch.arange(tall, device=q.device)[:, None]
        gap = gap - torch.arange(wide, device=q.device)
        mask = gap >= 0 if window is None else (gap >= 0) & (gap < window)
        rows, columns = _grid_places(self.queries, tall), _grid_places(self.keys, wide)
        out = F.scaled_dot_product_attention(
            _spread(q, rows, len(self.queries), tall), _spread(k, columns, len(self.keys), wide),
            _spread(v, columns, len(self.keys), wide), attn_mask=mask[:, None], scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)[rows]

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
               ) -> torch.Tensor:
        """Causal masks of unequal sides end in the same corner: the last query of a segment sees its last key."""
        queries, keys = (F.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (self.queries, self.keys))
        if flash().usable:
            return varlen(q, k, v, (queries, keys), self.longest, scale, window)
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), queries, keys, *self.longest,
                           scale=scale, window_size=(-1, 0), enable_gqa=True)


def _grid_places(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Where the tokens of packed segments stand in a grid of `longest` columns."""
    rows = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    return rows * longest + within(lengths)


def _spread(x: torch.Tensor, places: torch.Tensor, count: int, longest: int) -> torch.Tensor:
    """[n, heads, D] -> [count, heads, longest, D]."""
    full = x.new_zeros(count * longest, *x.shape[1:]).index_copy(0, places, x)
    return full.unflatten(0, (count, longest)).transpose(1, 2)
