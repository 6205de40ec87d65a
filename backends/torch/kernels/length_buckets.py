"""Packed sequences as a few rectangles, for kernels that know no lengths.

In: lengths of packed sequences. Out: `Grids`, which spreads the tokens of a packed row over one grid for each run of
nearly equal lengths, and joins what comes back. Attention costs the square of a grid's width, so sequences that share
one differ by a quarter of their length at most, short ones by a few tokens. Which sequences share a grid follows from
lengths alone. Gaps hold some token of the row: causality hides them, and what comes of them is not read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from rldsl.memory.decoding import bucket
from rldsl.runtime.store import within

SHORT = 16  # tokens by which the lengths in a grid may differ in any case


class Grids:
    """shapes: (sequences, tokens) of each grid. tokens [C]: the token of the row that stands in each cell, one grid
    behind the other; cells [T]: the cell of each token. gaps: cells that hold a token of another cell."""

    def __init__(self, lengths: torch.Tensor):
        known = lengths.cpu()  # asked once; places are worked out on the host
        sizes = known.tolist()
        shared: defaultdict[int, list[int]] = defaultdict(list)
        for i, size in enumerate(sizes):
            if size:
                shared[bucket(size, SHORT, 4)].append(i)
        runs = [shared[size] for size in sorted(shared)]
        self.shapes = [(len(run), max(sizes[i] for i in run)) for run in runs]
        order = torch.tensor([i for run in runs for i in run], dtype=torch.long)
        wide = torch.tensor([width for many, width in self.shapes for _ in range(many)], dtype=torch.long)
        at, each = within(wide), known[order].repeat_interleave(wide)
        tokens = (known.cumsum(0) - known)[order].repeat_interleave(wide) + at.clamp(max=each - 1)
        filled = at < each
        cells = torch.empty(sum(sizes), dtype=torch.long)
        cells[tokens[filled]] = filled.nonzero()[:, 0]
        self.tokens, self.cells, self.gaps = (x.to(lengths.device) for x in (tokens, cells, (~filled).nonzero()[:, 0]))

    def spread(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, heads, D] -> [sequences, tokens, heads, D] of each grid."""
        return _Spread.apply(x, self)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[sequences, tokens, heads, D] of each grid -> [T, heads, D]."""
        return _Join.apply(self, *parts)

    def cut(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[C, ...] -> the cells of each grid."""
        parts = x.split([many * wide for many, wide in self.shapes])
        return tuple(part.unflatten(0, shape) for part, shape in zip(parts, self.shapes))


def _line(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [part.flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class _Spread(torch.autograd.Function):
    """A token's gradient is that of its own cell: nothing that is read depends on a gap."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grids: Grids) -> tuple[torch.Tensor, ...]:
        ctx.grids = grids
        return grids.cut(x.index_select(0, grids.tokens))

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _line(slopes).index_select(0, ctx.grids.cells), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grids: Grids, *parts: torch.Tensor) -> torch.Tensor:
        ctx.grids = grids
        return _line(parts).index_select(0, grids.cells)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grids = ctx.grids
        return None, *grids.cut(slope.index_select(0, grids.tokens).index_fill_(0, grids.gaps, 0.0))
