"""With a lag the search chooses the split of the ranks: some generate while the others train."""

from __future__ import annotations

import pytest

from rldsl.search.branch_and_bound import branch_and_bound
from rldsl.simulate import Lengths
from tests.search.programs import PROGRAMS, cluster, instance

LENGTHS = Lengths(0.0, 150.0, 512.0)  # few responses are long, so more ranks do not make generation much faster


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_generation_gets_ranks_of_its_own(name: str) -> None:
    late = instance(name, "1B", cluster(1, 8), LENGTHS, text=PROGRAMS[name].replace("seed=1", "seed=1, lag=1"))
    plain = instance(name, "1B", cluster(1, 8), LENGTHS)
    fast, slow = (branch_and_bound(i, gap=0.02, max_nodes=20_000).best[0] for i in (late, plain))
    assert fast.seconds < 0.97 * slow.seconds, "a lag is worth it here"
    blocks = {j.name: b for j, b in zip(late.calls, fast.assignment.blocks, strict=True)}
    generate, train = blocks["actor.generate"], blocks["actor.train"]
    assert generate.stop <= train.start or train.stop <= generate.start, blocks
