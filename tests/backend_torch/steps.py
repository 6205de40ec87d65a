"""Optimizer steps of any shard against one process with plain transformers, autograd and torch's AdamW
(`test_train.reference`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch

from rldsl.plan.model import Layout, Model
from rldsl.runtime.backend import Shard
from rldsl.sharding.boxes import local_slice, slices
from rldsl.sharding.layout import degree_product
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.backend_torch.test_train import OPTIONS, RATES, ROWS, STEPS, UPDATES, minibatch, reference, share
from tests.world import run_world

ShardOf = Callable[[Model, Layout, int, bool], tuple[Any, int] | None]


def run(shard: Shard, what: str, mine: int, dp: int, steps: int = STEPS, recompute: str = "none",
        count: int = 2) -> list[float]:
    """Norms of the gradients. Up to `count` micro-batches, as many on each shard; the last step has one row, so that
    some shards have none."""
    norms = []
    for step in range(steps):
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


def difference(shard: Any, expected: dict[str, torch.Tensor]) -> float:
    """The largest of an element of a parameter."""
    worst = 0.0
    for name, tensor in shard.state_dict().items():
        parameter, pieces = shard.stage.held[name]
        assert tensor.numel() == sum(prod(b - a for a, b in p.box) for p in pieces)
        for p in pieces:
            mine = tensor[local_slice(p, p.box, parameter.dim)]
            worst = max(worst, float((mine - expected[name][slices(p.box)]).abs().max()))
    return worst


def check(path: str, kind: str, what: str, layouts: Sequence[Layout], shard_of: ShardOf = shard_of) -> None:
    """Parameters after all steps, and norms, under each layout."""
    expected, norms = reference(path, what)
    assert norms[0] > OPTIONS.clip_grad, "the test must clip"
    world = max(map(degree_product, layouts))
    for layout, worst, seen in sum(run_world(world, _steps, path, kind, what, layouts, expected, shard_of), []):
        assert worst < 1e-5, f"{layout}: a parameter differs by {worst}"
        assert seen == pytest.approx(norms, rel=1e-4), layout


def _steps(rank: int, path: str, kind: str, what: str, layouts: Sequence[Layout], expected: Any,
           shard_of: ShardOf) -> list[tuple[Layout, float, list[float]]]:
    """Layers are computed again in the backward pass where dp is 2."""
    found = []
    for layout in layouts:
        made = shard_of(plan_model(path, kind, OPTIONS, UPDATES), layout, rank, True)
        if made is not None:
            norms = run(made[0], what, made[1], layout.dp, recompute="full" if layout.dp == 2 else "none")
            found.append((layout, difference(made[0], expected), norms))
    return found
