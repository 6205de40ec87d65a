"""The bound of a movement is one: paths that are worked out never take less."""

from __future__ import annotations

from itertools import product

import pytest

from rldsl.search.space import Block
from tests.search.programs import cluster, instance

ON = (Block(0, 16), Block(0, 8), Block(8, 16), Block(0, 4), Block(4, 8))


@pytest.mark.parametrize("name, size", [("grpo", "1B"), ("ppo", "7B")])
def test_no_movement_takes_less(name: str, size: str) -> None:
    i = instance(name, size, cluster(2, 8))
    (home,) = [c for c, j in enumerate(i.calls) if j.kind == "train" and j.model == "actor"]
    (used,) = [c for c, j in enumerate(i.calls) if j.kind == "generate"]
    close = looked = 0
    for src, dst in product(ON, ON):
        for mine, e in product(i.table.entries(i.calls[home], src.size)[::7][:5],
                               i.table.entries(i.calls[used], dst.size)[::3][:4]):
            if src == dst and mine.strategy.degrees == e.strategy.degrees:
                continue
            least = i.least_move(home, src, mine, used, dst, e)
            found = i.moves("actor", src, mine.strategy, dst, e.strategy)
            looked += 1
            close += found.seconds <= 4 * least.seconds
            assert least.seconds <= found.seconds and least.after <= found.after and least.bytes <= found.bytes, (
                src, mine.strategy, dst, e.strategy)
            assert i.least_move(home, src, mine, used, dst, e) == found  # from now on it is known
    assert looked > 50 and close > looked / 2
