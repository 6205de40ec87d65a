"""Optimizer steps with several chunks of layers on a rank, against one process with plain transformers and AdamW."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from rldsl.plan.model import Layout
from tests.backend_torch.shards import plan_model, shard_of
from tests.backend_torch.steps import difference, run
from tests.backend_torch.test_train import OPTIONS, UPDATES, reference
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

Case = tuple[int, int, int, int, int, int]  # dp, tp, pp, vpp, zero, micro-batches


def steps(rank: int, path: str, kind: str, what: str, every: list[Case], expected: Any) -> list[Any]:
    """For each case with this rank: (case, largest difference of a parameter, norms, layers of each chunk)."""
    found = []
    for case in every:
        dp, tp, pp, vpp, zero, count = case
        layout = Layout("L0", "m0", dp=dp, tp=tp, pp=pp, vpp=vpp, zero=zero)
        made = shard_of(plan_model(path, kind, OPTIONS, UPDATES), layout, rank, True)
        if made is None:
            continue
        shard, mine = made
        norms = run(shard, what, mine, dp, recompute="full" if zero == 3 else "none", count=count)
        found.append((case, difference(shard, expected), norms, [tuple(c.layers) for c in shard.stage.chunks]))
    return found


def layers(n: int) -> dict[str, int]:
    return dict(num_hidden_layers=n)


FIVE = [(1, 1, 2, 2, 0, 5), (1, 1, 2, 1, 0, 3), (2, 1, 2, 2, 0, 2), (1, 2, 2, 2, 0, 3), (2, 1, 2, 2, 1, 3),
        (2, 1, 2, 2, 2, 3), (2, 1, 2, 2, 3, 3)]
CASES = [("qwen3", layers(5), "causal_lm", "logprobs", FIVE),
         ("qwen3", layers(9) | dict(tie_word_embeddings=True), "causal_lm", "logprobs", [(1, 1, 4, 2, 0, 7)]),
         ("llama", layers(6), "causal_lm", "logprobs", [(1, 1, 2, 3, 0, 4)]),
         ("gemma", layers(4), "causal_lm", "logprobs", [(1, 1, 2, 2, 0, 2)]),
         ("qwen3", layers(5), "value_model", "values", [(1, 2, 2, 2, 0, 3)])]


@pytest.mark.thorough
@pytest.mark.parametrize("family, overrides, kind, what, every", thorough_between(CASES), ids=["qwen3", "tied", "llama", "gemma", "values"])
def test_steps_equal_one_process(tmp_path, family, overrides, kind, what, every):
    path = str(make_model(tmp_path / "m", family=family, **overrides))
    expected, norms = reference(path, what)
    results = run_world(max(prod(case[:3]) for case in every), steps, path, kind, what, every, expected)
    for case, worst, seen, held in (found for rank in results for found in rank):
        assert worst < 1e-5, f"{case}: a parameter differs by {worst}"
        assert seen == pytest.approx(norms, rel=1e-4), case
        assert len(held) == case[3] and all(held), held
