"""Optimizer steps under `zero` against one process with plain transformers, autograd and torch's AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rldsl.backends.torch import build
from rldsl.plan.boxes import local_slice
from rldsl.plan.layout import axis_ranks, coordinate
from rldsl.plan.model import Layout, Mesh
from rldsl.runtime.backend import Axes, Shard
from tests.backend_torch.shards import _axis, pack, plan_model
from tests.backend_torch.test_train import OPTIONS, RATES, ROWS, STEPS, TWO, UPDATES, minibatch, reference, share
from tests.tiny import make_model
from tests.world import run_world

Degrees = tuple[int, int, int, int]  # zero, dp, tp, pp
EVERY = [(1, 2, 1, 1), (2, 4, 1, 1), (3, 4, 1, 1), (1, 2, 2, 1), (3, 2, 2, 1), (2, 2, 1, 2), (3, 2, 1, 2)]


def make(path: str, kind: str, rank: int, degrees: Degrees, dtype: str = "float32") -> tuple[Shard, int] | None:
    """The shard of this rank, and its place in dp."""
    zero, dp, tp, pp = degrees
    mesh, layout = Mesh("m0", ((0, dp * tp * pp),)), Layout("L0", "m0", dp=dp, tp=tp, pp=pp, zero=zero)
    groups = {axis: axis_ranks(layout, mesh, axis) for axis in ("dp", "tp", "pp", "cp", "mesh")}
    if rank >= dp * tp * pp:
        for found in groups.values():
            for ranks in found:
                if len(ranks) > 1:
                    dist.new_group(list(ranks))
        return None
    model = plan_model(path, kind, OPTIONS, UPDATES, dtype)
    axes = Axes(**{axis: _axis(found, rank) for axis, found in groups.items()})
    return build(model, layout, mesh, axes, torch.device("cpu"), load=True, trainable=True), coordinate(layout, mesh, rank).dp


def run(shard: Shard, what: str, mine: int, dp: int, steps: int = STEPS, recompute: str = "none") -> list[float]:
    """Norms of the gradients. One sequence after another within a share, in as many passes on each shard."""
    norms = []
    for step in range(steps):
        rows = [minibatch(step)[i::dp] for i in range(dp)]
        parts = [rows[mine][i::2] for i in range(min(2, max(map(len, rows))))]

        def loss(i: int, fresh: Sequence[Any], parts: list[list[int]] = parts) -> torch.Tensor:
            sizes = [len(ROWS[r][1]) for r in parts[i]]
            offset = 0.1 if what == "values" else 0.0
            return sum(share((f - offset * r).square()) for f, r in zip(fresh[0][what].split(sizes), parts[i]))

        result = shard.train([(pack([ROWS[r] for r in part]),) for part in parts], [(what,)], 0.7, loss, None, recompute)
        assert result["lr"] == pytest.approx(RATES[step])
        norms.append(result["grad_norm"])
    return norms


def difference(shard: Any, expected: dict[str, torch.Tensor]) -> float:
    worst = 0.0
    for name, tensor in shard.tensors().items():
        parameter, pieces = shard.stage.held[name]
        assert tensor.numel() == sum(prod(b - a for a, b in p.box) for p in pieces)
        dim = parameter.spec.split.dim if parameter.spec.split else 0
        for p in pieces:
            right = expected[name][tuple(slice(*b) for b in p.box)]
            worst = max(worst, float((tensor[local_slice(p, p.box, dim)] - right).abs().max()))
    return worst


def steps(rank: int, path: str, kind: str, what: str, every: list[Degrees], expected: Any) -> list[Any]:
    found = []
    for degrees in every:
        made = make(path, kind, rank, degrees)
        if made is not None:
            norms = run(*((made[0], what, made[1], degrees[1])), recompute="full" if degrees[0] == 3 else "none")
            found.append((degrees, difference(made[0], expected), norms))
    return found


CASES = [("qwen3", {}, "causal_lm", "logprobs", EVERY),
         ("qwen3", TWO | dict(tie_word_embeddings=True), "causal_lm", "logprobs", [(1, 2, 1, 2), (3, 2, 2, 2)]),
         ("llama", TWO | dict(attention_bias=True, mlp_bias=True), "causal_lm", "logprobs", [(3, 2, 4, 1)]),
         ("qwen3", TWO, "value_model", "values", [(2, 4, 1, 1), (3, 2, 1, 2)])]


@pytest.mark.parametrize("family, overrides, kind, what, every", CASES, ids=["qwen3", "tied", "llama", "values"])
def test_steps_equal_one_process(tmp_path, family, overrides, kind, what, every):
    """The last step has one row: all shards but one have none."""
    path = str(make_model(tmp_path / "m", family=family, **overrides))
    expected, norms = reference(path, what)
    results = run_world(max(prod(d[1:]) for d in every), steps, path, kind, what, every, expected)
    for degrees, worst, seen in (found for rank in results for found in rank):
        assert worst < 1e-5, f"{degrees}: a parameter differs by {worst}"
        assert seen == pytest.approx(norms, rel=1e-4), degrees


def gathered(shard: Any) -> set[int]:
    """Layers that are whole now."""
    return {i for i, unit in shard.stage.sharded.layers.items() if any(w.untyped_storage().nbytes() for w in unit.whole)}


def watched(rank: int, path: str) -> dict[int, Any]:
    """By level: how many layers are whole at once in a forward pass, and what is left after a step."""
    found = {}
    for zero in (1, 2, 3):
        shard, mine = make(path, "causal_lm", rank, (zero, 2, 1, 1))
        seen: list[set[int]] = []
        for layer in shard.stage.chunks[0].body.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: seen.append(gathered(shard)))
        run(shard, "logprobs", mine, 2, 1)
        numbers = sum(t.numel() for t in shard.tensors().values())
        found[zero] = (max(map(len, seen)), gathered(shard), numbers, shard.trainer.flat.numel(),
                       sum(t.numel() for kind in shard.moments().values() for t in kind.values()),
                       all(p.grad is None for u in shard.stage.sharded.units for p in u.whole))
    return found


def test_memory_is_divided(tmp_path):
    path = str(make_model(tmp_path / "m", num_hidden_layers=4))
    total = sum(prod(p.shape) * (4 if "{}" in p.name else 1) for p in plan_model(path).params)
    for found in run_world(2, watched, path):
        for zero, (most, after, numbers, flat, moments, clean) in found.items():
            assert most == (1 if zero == 3 else 4) and after == set() and clean
            assert numbers == flat == moments // 2 and abs(numbers - total / 2) < 64


def halves(rank: int, path: str) -> list[tuple[list[float], dict[str, np.ndarray]]]:
    """bf16, without and with every level. As arrays: a tensor would be shared by a process that has ended."""
    out = []
    for zero in (0, 1, 2, 3):
        shard, mine = make(path, "causal_lm", rank, (zero, 2, 1, 1), "bfloat16")
        norms = run(shard, "logprobs", mine, 2)
        assert all(t.dtype == torch.float32 for t in shard.tensors().values())
        rows = {n: t if zero else t[: (len(t) + 1) // 2] for n, t in shard.tensors().items()}
        out.append((norms, {n: t.numpy(force=True) for n, t in rows.items()}))
    return out


def test_halves_are_as_without(tmp_path):
    """Only matrices travel in bfloat16, so that the numbers are those of a run that gathers nothing."""
    (norms, plain), *others = run_world(2, halves, str(make_model(tmp_path / "m")))[0]
    for seen, tensors in others:
        assert seen == pytest.approx(norms, rel=1e-5)
        assert all(np.allclose(tensors[n], plain[n], rtol=0, atol=2e-6) for n in plain)


def stopping(rank: int, path: str) -> bool:
    """A step that a loss stops changes nothing, and leaves nothing behind for the next."""
    shard, mine = make(path, "causal_lm", rank, (3, 2, 1, 1))
    before = {n: t.clone() for n, t in shard.tensors().items()}
    batch = [(pack(ROWS[mine : mine + 3]),)]
    none = shard.train(batch, [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum(), lambda: True)
    same = none is None and all(torch.equal(before[n], t) for n, t in shard.tensors().items())
    norm = shard.train(batch, [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum())["grad_norm"]
    other, _ = make(path, "causal_lm", rank, (2, 2, 1, 1))
    right = other.train(batch, [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum())["grad_norm"]
    return same and norm == pytest.approx(right, rel=1e-5) and not gathered(shard)


def test_a_minibatch_without_a_step(tmp_path):
    assert run_world(2, stopping, str(make_model(tmp_path / "m"))) == [True, True]


def infinite(rank: int, path: str) -> bool:
    shard, mine = make(path, "causal_lm", rank, (2, 2, 1, 1))
    before = {n: t.clone() for n, t in shard.tensors().items()}
    norm = shard.train([(pack(ROWS[:2]),)], [("logprobs",)], 1.0,
                       lambda _, fresh: fresh[0]["logprobs"].sum() * (torch.inf if mine else 1.0))["grad_norm"]
    return norm != norm or norm == torch.inf and all(torch.equal(before[n], t) for n, t in shard.tensors().items())


def test_a_gradient_that_is_not_finite_on_one_shard_stops_all(tmp_path):
    assert run_world(2, infinite, str(make_model(tmp_path / "m"))) == [True, True]
