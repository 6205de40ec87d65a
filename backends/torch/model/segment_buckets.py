"""Attention of segments of sequences in buckets whose sizes follow from each segment alone.

In: the segments of a pass (runs of a sequence's queries, which see its keys up to the last of them), by groups of
tokens. Out: their attention. Segments of the same rounded sizes share a bucket, whatever leaf or group they are in.
A kernel computes each of them alone, so its numbers do not depend on the others: a pass over several leaves has the
gradients of one over each, with as many calls of kernels as one of them.

The gradient of a key is summed in its group over the segments that see it, two at most, and is left apart for each
group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.model.attention import Scores, masked_attention
from rldsl.memory.decode_shapes import round_to_bucket

UNIT = 8  # both sizes of a bucket are multiples, four to each doubling


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of queries of a sequence, and the keys from its start to the last of them."""

    group: int    # of tokens, among those of this rank
    query: int    # the row of its first query; the others follow
    queries: int
    start: int    # position of its first query in its sequence
    keys: torch.Tensor  # [start + queries] their rows among the keys of all ranks


@dataclass(frozen=True, slots=True)
class _KeyCells:
    """Where the keys of a group are in the buckets."""

    rows: torch.Tensor    # [n] of each key of each segment
    cells: torch.Tensor   # [n]
    last: torch.Tensor    # [m] of these n, the one of each row in the last segment that sees it
    before: torch.Tensor  # [k] the others: each row has one more at most


class SegmentBuckets:
    """The buckets of a pass. Cells are those of all buckets, one bucket after the other."""

    def __init__(self, segments: Sequence[Segment], groups: int, rows: int, device: torch.device):
        """groups: of tokens on this rank. rows: of queries on this rank, of which some may be padding."""
        by_shape: defaultdict[tuple[int, int], list[Segment]] = defaultdict(list)
        # a rank without queries takes part in sums over ranks all the same
        for s in segments or [Segment(0, 0, 0, 0, torch.empty(0, dtype=torch.long, device="cpu"))]:
            by_shape[_bucket_size(s.queries), _bucket_size(len(s.keys))].append(s)
        self.rows = rows
        self.shapes = [(len(by_shape[shape]), *shape) for shape in sorted(by_shape)]  # (segments, queries, keys)
        ordered = [s for shape in sorted(by_shape) for s in by_shape[shape]]
        widths = [shape for shape in sorted(by_shape) for _ in by_shape[shape]]
        first_query, first_key = 0, 0
        query_rows, query_cells = [], []
        keys: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(groups)]
        for s, (queries, columns) in zip(ordered, widths, strict=True):
            at = torch.arange(s.queries, device="cpu")
            query_rows.append(s.query + at)
            query_cells.append(first_query + at)
            keys[s.group].append((s.keys, first_key + torch.arange(len(s.keys), device="cpu")))
            first_query, first_key = first_query + queries, first_key + columns
        self.num_cells = first_query, first_key
        self.query_rows, self.query_cells = (torch.cat(x).to(device) for x in (query_rows, query_cells))
        self.starts = torch.tensor([s.start for s in ordered], device=device).split([n for n, _, _ in self.shapes])
        self.keys = [_key_cells(x, device) for x in keys]

    def attend(self, q: torch.Tensor, seen: Sequence[torch.Tensor], sizes: tuple[int, int], scores: Scores
               ) -> torch.Tensor:
        """q: [rows, H, D]. seen: keys and values side by side, [R, K * D + K * E], for each group. sizes: K * D and
        K * E. Returns [rows, H, E]; that of padding is 0."""
        query_cells, key_cells = _ToCells.apply(self, q, *seen)
        out = []
        for queries, visible, starts, (count, width, columns) in zip(
                query_cells.split([n * t for n, t, _ in self.shapes]),
                key_cells.split([n * c for n, _, c in self.shapes]), self.starts, self.shapes, strict=True):
            at = starts[:, None, None] + torch.arange(width, device=q.device)[:, None]
            k, v = (x.unflatten(1, (-1, q.shape[2])).unflatten(0, (count, columns)).transpose(1, 2)
                    for x in visible.split(sizes, 1))
            mask = scores.visible(at, torch.arange(columns, device=q.device))[:, None]
            bucket = masked_attention(queries.unflatten(0, (count, width)).transpose(1, 2), k, v, mask, scores)
            out.append(bucket.transpose(1, 2).flatten(0, 1))
        found: torch.Tensor = _FromCells.apply(self, *out)
        return found


def _bucket_size(count: int) -> int:
    return round_to_bucket(max(count, 1), UNIT, 4)


def _key_cells(of: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> _KeyCells:
    if not any(len(rows) for rows, _ in of):
        none = torch.empty(0, dtype=torch.long, device=device)
        return _KeyCells(none, none, none, none)
    rows, cells = (torch.cat(x) for x in zip(*of, strict=True))
    place = torch.empty(int(rows.max()) + 1, dtype=torch.long, device="cpu")
    place[rows] = torch.arange(len(rows), device="cpu")  # the last one stays
    is_last = place[rows] == torch.arange(len(rows), device="cpu")
    return _KeyCells(*(x.to(device) for x in (rows, cells, is_last.nonzero()[:, 0], (~is_last).nonzero()[:, 0])))


class _ToCells(Function):
    """Rows -> the cells of the buckets of queries, and those of keys; 0 where a bucket is wider than a segment."""

    @staticmethod
    def forward(ctx: Any, buckets: SegmentBuckets, q: torch.Tensor, *seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.buckets, ctx.rows = buckets, len(seen[0])
        queries = q.new_zeros(buckets.num_cells[0], *q.shape[1:])
        queries.index_copy_(0, buckets.query_cells, q.index_select(0, buckets.query_rows))
        keys = seen[0].new_zeros(buckets.num_cells[1], seen[0].shape[1])
        for x, at in zip(seen, buckets.keys, strict=True):
            keys.index_copy_(0, at.cells, x.index_select(0, at.rows))
        return queries, keys

    @staticmethod
    def backward(ctx: Any, of_queries: torch.Tensor, of_keys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        buckets: SegmentBuckets = ctx.buckets
        grad_q = of_queries.new_zeros(buckets.rows, *of_queries.shape[1:])
        grad_q.index_copy_(0, buckets.query_rows, of_queries.index_select(0, buckets.query_cells))
        found = []
        for at in buckets.keys:
            total = of_keys.new_zeros(ctx.rows, of_keys.shape[1])
            total.index_copy_(0, at.rows[at.last], of_keys.index_select(0, at.cells[at.last]))
            rows = at.rows[at.before]
            total.index_copy_(0, rows, total.index_select(0, rows) + of_keys.index_select(0, at.cells[at.before]))
            found.append(total)
        return None, grad_q, *found


class _FromCells(Function):
    """[cells, H, E] of each bucket -> [rows, H, E]."""

    @staticmethod
    def forward(ctx: Any, buckets: SegmentBuckets, *cells: torch.Tensor) -> torch.Tensor:
        ctx.buckets = buckets
        joined = torch.cat(cells)
        out = joined.new_zeros(buckets.rows, *joined.shape[1:])
        return out.index_copy_(0, buckets.query_rows, joined.index_select(0, buckets.query_cells))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        buckets: SegmentBuckets = ctx.buckets
        cells = grad.new_zeros(buckets.num_cells[0], *grad.shape[1:])
        cells.index_copy_(0, buckets.query_cells, grad.index_select(0, buckets.query_rows))
        return None, *cells.split([count * width for count, width, _ in buckets.shapes])
