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
        for mine, e in product(i.table.candidates(i.calls[home], src.size)[::7][:5],
                               i.table.candidates(i.calls[used], dst.size)[::3][:4]):
            if src == dst and mine.strategy.degrees == e.strategy.degrees:
                continue
            least = i.reshard_bounds.min_cost(home, src, mine, used, dst, e)
            found = i.reshard_costs.cost("actor", src, mine.strategy, dst, e.strategy)
            looked += 1
            close += found.transfer_seconds <= 4 * least.transfer_seconds
            assert (least.transfer_seconds <= found.transfer_seconds and least.unpack_seconds <= found.unpack_seconds
                    and least.received_bytes <= found.received_bytes), (src, mine.strategy, dst, e.strategy)
            assert i.reshard_bounds.min_cost(home, src, mine, used, dst, e) == found  # it is cached from now on
    assert looked > 50 and close > looked / 2
