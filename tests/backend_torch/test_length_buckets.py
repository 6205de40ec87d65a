"""Sequences of nearly equal lengths share a grid: every token has its cell, and no result depends on a gap."""

from __future__ import annotations

import pytest
import torch
from rldsl.backends.torch.kernels.length_buckets import MIN_STEP, LengthBuckets
from rldsl.backends.torch.model.attention import Scores, VarlenAttention

LENGTHS = ([1], [5, 5, 5], [3, 90, 17, 1, 64, 33, 16, 89], list(range(1, 40)), [4, 0, 7])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_token_has_its_cell(lengths: list[int]) -> None:
    buckets = LengthBuckets(torch.tensor(lengths))
    rows = torch.arange(sum(lengths))
    assert torch.equal(buckets.token_of_cell[buckets.cell_of_token], rows)
    cells = [*buckets.cell_of_token.tolist(), *buckets.padding_cells.tolist()]
    assert sorted(cells) == list(range(len(buckets.token_of_cell)))
    x = torch.arange(6.0 * len(rows)).view(-1, 2, 3)
    parts = buckets.pad(x)
    assert torch.equal(buckets.unpad(parts), x)
    starts = dict(zip(torch.tensor(lengths).cumsum(0).sub(torch.tensor(lengths)).tolist(), lengths))
    for part, (_, wide) in zip(parts, buckets.shapes):
        sizes = [starts[int(row[0, 0, 0]) // 6] for row in part]
        assert max(sizes) == wide and wide - min(sizes) < max(MIN_STEP, wide / 4 + 1)


@pytest.mark.parametrize("window", (None, 4))
@pytest.mark.parametrize("lengths", LENGTHS[:4])
def test_attention_and_its_gradients_are_those_of_each_sequence(lengths: list[int], window: int | None) -> None:
    g = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    given = [torch.randn(heads, total, 8, dtype=torch.float64, generator=g).requires_grad_() for heads in (4, 2, 2)]
    slope = torch.randn(total, 4, 8, dtype=torch.float64, generator=g)
    found = VarlenAttention(torch.tensor(lengths)).attend(0, *given, Scores(0.3, window))
    alone = torch.cat([VarlenAttention(torch.tensor([x.shape[1]])).attend(0, x, k, v, Scores(0.3, window)) for x, k, v in zip(
        *(x.split(lengths, 1) for x in given))])
    wanted, made = (torch.autograd.grad(out, given, slope) for out in (_plain(given, lengths, window), found))
    torch.testing.assert_close(found, _plain(given, lengths, window))
    torch.testing.assert_close(found, alone)
    for a, b in zip(made, wanted):
        torch.testing.assert_close(a, b)


def _plain(given: list[torch.Tensor], lengths: list[int], window: int | None) -> torch.Tensor:
    """By the formula, a sequence at a time. [T, H, D]."""
    out = []
    for q, k, v in zip(*(x.split(lengths, 1) for x in given)):
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        gap = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (gap >= 0) & (gap < (window or len(gap)))
        scores = (q @ k.transpose(1, 2) * 0.3).masked_fill(~seen, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(out)
