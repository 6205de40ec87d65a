"""Draws that rounding moves: none with `invariant=true`, few without. A drawn part of the grid of placements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.consistency import grid, moved
from tests.tiny import make_model


@pytest.mark.parametrize("invariant", [True, False])
def test_moved_draws_in_a_million_tokens(invariant: bool, tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", **moved.WIDTH))
    found = moved.count(path, invariant, 64, 32)
    assert found.tokens > 3000
    assert found.draws == 0 if invariant else found.per_million < 1000


def test_heads_that_two_ranks_share(tmp_path: Path) -> None:
    """Three query heads for a key head, which two ranks have, in bfloat16; over a whole program."""
    model = make_model(tmp_path / "m", **grid.FAMILIES["odd"])
    places = dict(grid.placements("odd"))
    one, four = (grid.run(tmp_path / name.replace(" ", ""), model, "bfloat16", places[name], 2)
                 for name in ("one rank", "tp=4"))
    assert one == four and one.gap == 0
