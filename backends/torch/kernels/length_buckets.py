"""Length-bucketed attention: packed sequences as a few padded batches, for kernels that know no lengths.

In: lengths of packed sequences. Out: `LengthBuckets`, which copies the tokens of a packed row into one padded batch for
each run of nearly equal lengths, and copies results back.

Attention costs the square of a batch's width, so the sequences of a bucket differ by a quarter of their length at most,
short ones by a few tokens. Padding holds a copy of some token of the row: causality hides it from every real query, and
nothing that is computed for it is read.
Invariant: which sequences share a bucket depends on lengths alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.memory.decode_shapes import round_to_bucket
from rldsl.runtime.store import offsets_within

MIN_STEP = 16  # tokens by which the lengths in a bucket may differ in any case


class LengthBuckets:
    """The buckets of one packed row. Cells are the tokens of all buckets, one bucket after the other: C in all, of
    which T hold a token of the row and the others are padding."""

    runs: list[list[int]]          # numbers of the sequences of each bucket; empty ones are in none
    shapes: list[tuple[int, int]]  # (sequences, tokens) of each bucket
    token_of_cell: torch.Tensor    # [C] the token of the row that a cell holds
    cell_of_token: torch.Tensor    # [T]
    padding_cells: torch.Tensor    # [C - T]

    def __init__(self, lengths: torch.Tensor, on_host: Sequence[int] | None = None, before: Sequence[int] = ()):
        """lengths: [S] int64. on_host: the same, if the host knows them. before: a second number of tokens of each
        sequence, by which those of a bucket are alike, too."""
        # without these, the one wait for the device: everything below is computed on the host
        host_lengths = lengths.cpu() if on_host is None else torch.tensor(on_host, dtype=torch.long)
        sizes = host_lengths.tolist()
        by_width: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, both in enumerate(zip(sizes, before or sizes, strict=True)):
            if sizes[i]:
                by_width[tuple(round_to_bucket(size, MIN_STEP, 4) for size in both)].append(i)
        self.runs = runs = [by_width[width] for width in sorted(by_width)]
        self.shapes = [(len(run), max(sizes[i] for i in run)) for run in runs]
        order = torch.tensor([i for run in runs for i in run], dtype=torch.long)
        widths = torch.tensor([width for count, width in self.shapes for _ in range(count)], dtype=torch.long)
        column, length = offsets_within(widths), host_lengths[order].repeat_interleave(widths)
        tokens = (host_lengths.cumsum(0) - host_lengths)[order].repeat_interleave(widths)
        tokens = tokens + column.clamp(max=length - 1)  # padding repeats the sequence's last token
        real = column < length
        cells = torch.empty(sum(sizes), dtype=torch.long)
        cells[tokens[real]] = real.nonzero()[:, 0]
        self.token_of_cell, self.cell_of_token, self.padding_cells = (
            x.to(lengths.device) for x in (tokens, cells, (~real).nonzero()[:, 0]))

    def pad(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, heads, D] -> [sequences, tokens, heads, D] of each bucket."""
        batches: tuple[torch.Tensor, ...] = _Pad.apply(x, self)
        return batches

    def unpad(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """[sequences, tokens, heads, D] of each bucket -> [T, heads, D]."""
        out: torch.Tensor = _Unpad.apply(self, *batches)
        return out

    def split_cells(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[C, ...] -> [sequences, tokens, ...] of each bucket."""
        parts = x.split([count * width for count, width in self.shapes])
        return tuple(part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True))


def _join_cells(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of `split_cells`."""
    flat = [batch.flatten(0, 1) for batch in batches]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class _Pad(Function):
    """The gradient of a token is that of its own cell: nothing that is read depends on padding."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buckets: LengthBuckets) -> tuple[torch.Tensor, ...]:
        ctx.buckets = buckets
        return buckets.split_cells(x.index_select(0, buckets.token_of_cell))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _join_cells(grads).index_select(0, ctx.buckets.cell_of_token), None


class _Unpad(Function):
    @staticmethod
    def forward(ctx: Any, buckets: LengthBuckets, *batches: torch.Tensor) -> torch.Tensor:
        ctx.buckets = buckets
        return _join_cells(batches).index_select(0, buckets.cell_of_token)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        buckets = ctx.buckets
        cells = grad.index_select(0, buckets.token_of_cell).index_fill_(0, buckets.padding_cells, 0.0)
        return None, *buckets.split_cells(cells)
