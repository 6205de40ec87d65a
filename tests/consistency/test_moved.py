"""Draws that rounding moves: none with `invariant=true`, some without. A part of the grid of placements. What a sum in
one order moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.invariant import wire_bytes
from rldsl.backends.torch.model.collectives import tree_all_reduce, tree_of
from rldsl.runtime import collectives
from rldsl.runtime.backend import Axis
from tests.consistency import grid, moved
from tests.tiny import make_model
from tests.world import run_world


@pytest.mark.thorough
@pytest.mark.parametrize("invariant", [True, False])
def test_moved_draws_in_a_million_tokens(invariant: bool, tmp_path: Path) -> None:
    """In bfloat16, where so few tokens are enough to see some without."""
    path = str(make_model(tmp_path / "m", **moved.WIDTH))
    found = moved.count(path, invariant, 64, 32, "bfloat16")
    assert found.tokens > 2000
    assert found.draws == 0 if invariant else 100 < found.per_million < 100_000


def test_heads_that_two_ranks_share(tmp_path: Path) -> None:
    """Three query heads for a key head, which two ranks have, in bfloat16; over a whole program."""
    model = make_model(tmp_path / "m", **grid.FAMILIES["odd"])
    places = dict(grid.placements("odd"))
    one, four = (grid.run(tmp_path / name.replace(" ", ""), model, "bfloat16", places[name], 2)
                 for name in ("one rank", "tp=4"))
    assert one == four and one.exact


def sent_bytes(rank: int, sizes: Sequence[int]) -> list[int]:
    """What this rank sends for a sum over all ranks in one order, of so many float32 each."""
    ranks = tuple(range(dist.get_world_size()))
    sent = [0]

    def counted(real: Callable[..., Any], copies: float) -> Callable[..., Any]:
        def call(out: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> Any:
            sent[0] += int(x.numel() * x.element_size() * copies)
            return real(out, x, *args, **options)

        return call

    dist.all_to_all_single = counted(dist.all_to_all_single, (len(ranks) - 1) / len(ranks))
    collectives.ALL_GATHER = counted(collectives.ALL_GATHER, len(ranks) - 1)
    found = []
    for size in sizes:
        sent[0] = 0
        x = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        total = tree_all_reduce(x, Axis(ranks, rank, dist.group.WORLD))
        terms = torch.stack([torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in ranks])
        assert torch.equal(total, tree_of(terms))
        found.append(sent[0])
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_sum_in_one_order_moves_the_bytes_of_a_ring(ranks: int) -> None:
    sizes = [8, 1 << 10, 1 << 17]
    for found in run_world(ranks, sent_bytes, sizes):
        for size, bytes_ in zip(sizes, found, strict=True):
            ours, ring = wire_bytes(ranks, 4 * size)
            assert bytes_ == ours == ring
