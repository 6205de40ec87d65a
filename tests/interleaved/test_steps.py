"""Optimizer steps with several chunks of layers on a rank, against one process with plain transformers and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.backends.torch import build
from rldsl.plan.layout import axis_ranks, coordinate
from rldsl.plan.model import Layout, Mesh
from rldsl.runtime.backend import Axes
from tests.backend_torch.shards import _axis, pack, plan_model
from tests.backend_torch.test_train import OPTIONS, RATES, ROWS, STEPS, TWO, UPDATES, minibatch, reference, share
from tests.tiny import make_model
from tests.world import run_world
from tests.zero.test_steps import difference

Case = tuple[int, int, int, int, int, int]  # dp, tp, pp, vpp, zero, micro-batches


def steps(rank: int, path: str, kind: str, what: str, every: list[Case], expected: Any) -> list[Any]:
    """For each case with this rank: (case, largest difference of a parameter, norms, layers of each chunk)."""
    found = []
    for case in every:
        dp, tp, pp, vpp, zero, count = case
        mesh = Mesh("m0", ((0, dp * tp * pp),))
        layout = Layout("L0", "m0", dp=dp, tp=tp, pp=pp, vpp=vpp, zero=zero)
        groups = {axis: axis_ranks(layout, mesh, axis) for axis in ("dp", "tp", "pp", "cp", "mesh")}
        if rank >= dp * tp * pp:
            for ranks in (ranks for axis in groups.values() for ranks in axis if len(ranks) > 1):
                dist.new_group(list(ranks))
            continue
        axes = Axes(**{axis: _axis(ranks, rank) for axis, ranks in groups.items()})
        shard = build(plan_model(path, kind, OPTIONS, UPDATES), layout, mesh, axes, torch.device("cpu"), load=True,
                      trainable=True)
        norms = run(shard, what, coordinate(layout, mesh, rank).dp, dp, count, "full" if zero == 3 else "none")
        found.append((case, difference(shard, expected), norms, [tuple(c.layers) for c in shard.stage.chunks]))
    return found


def run(shard: Any, what: str, mine: int, dp: int, count: int, recompute: str) -> list[float]:
    """Norms of the gradients. The last step has one row, so fewer micro-batches than ranks, and shards without any."""
    norms = []
    for step in range(STEPS):
        rows = [minibatch(step)[i::dp] for i in range(dp)]
        parts = [rows[mine][i::count] for i in range(min(count, max(map(len, rows))))]

        def loss(i: int, fresh: Sequence[Any], parts: list[list[int]] = parts) -> torch.Tensor:
            offset = 0.1 if what == "values" else 0.0
            each = fresh[0][what].split([len(ROWS[r][1]) for r in parts[i]])
            return sum(share((f - offset * r).square()) for f, r in zip(each, parts[i]))

        result = shard.train([(pack([ROWS[r] for r in part]),) for part in parts], [(what,)], 0.7, loss, None, recompute)
        assert result["lr"] == pytest.approx(RATES[step])
        norms.append(result["grad_norm"])
    return norms


def layers(n: int) -> dict[str, int]:
    return dict(num_hidden_layers=n)


FIVE = [(1, 1, 2, 2, 0, 5), (1, 1, 2, 1, 0, 3), (2, 1, 2, 2, 0, 2), (1, 2, 2, 2, 0, 3), (2, 1, 2, 2, 1, 3),
        (2, 1, 2, 2, 2, 3), (2, 1, 2, 2, 3, 3)]
CASES = [("qwen3", layers(5), "causal_lm", "logprobs", FIVE),
         ("qwen3", layers(9) | dict(tie_word_embeddings=True), "causal_lm", "logprobs", [(1, 1, 4, 2, 0, 7)]),
         ("llama", layers(6), "causal_lm", "logprobs", [(1, 1, 2, 3, 0, 4)]),
         ("gemma", layers(4), "causal_lm", "logprobs", [(1, 1, 2, 2, 0, 2)]),
         ("qwen3", layers(5), "value_model", "values", [(1, 2, 2, 2, 0, 3)])]


@pytest.mark.parametrize("family, overrides, kind, what, every", CASES, ids=["qwen3", "tied", "llama", "gemma", "values"])
def test_steps_equal_one_process(tmp_path, family, overrides, kind, what, every):
    path = str(make_model(tmp_path / "m", family=family, **overrides))
    expected, norms = reference(path, what)
    results = run_world(max(prod(case[:3]) for case in every), steps, path, kind, what, every, expected)
    for case, worst, seen, held in (found for rank in results for found in rank):
        assert worst < 1e-5, f"{case}: a parameter differs by {worst}"
        assert seen == pytest.approx(norms, rel=1e-4), case
        assert len(held) == case[3] and all(held), held
