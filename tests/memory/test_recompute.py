"""`recompute=full` changes what is kept, and no number: losses, gradients and parameters agree on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.placement.place import place_graph
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import pack, plan_model, ragged
from tests.backend_torch.test_forward import _partial
from tests.compiler.graphs import family, on, ppo
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

ROWS = ragged(24, 40, seed=3)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (1, 1, 4)]


def _both_ways(rank, path, layouts, dtype):
    """For each layout with this rank: (losses, norms, parameters) with and without, after two steps."""
    found = []
    for dp, tp, pp in layouts:
        ways = []
        for recompute in ("none", "full"):
            model = plan_model(path, "causal_lm", Optimizer(lr=1e-2, clip_grad=0.0), 4, dtype)
            shard = _partial(model, rank, dp, tp, pp, trainable=True)
            if shard is None:
                continue
            ways.append(_train(shard, rank // tp % dp, dp, recompute))
        if ways:
            (losses, norms, plain), (losses2, norms2, again) = ways
            worst = max(float((plain[n] - again[n]).abs().max()) for n in plain)
            found.append(((dp, tp, pp), losses == losses2, norms == norms2 and min(norms) > 0, worst))
    return found


def _train(shard, mine, dp, recompute):
    losses, norms = [], []
    rows = ROWS[mine::dp]

    def loss(i, fresh):
        value = fresh[0]["logprobs"].square().mean() + fresh[0]["entropy"].mean()
        losses.append(float(value.detach()))
        return value

    for _ in range(2):
        parts = [(pack(rows[i::3]),) for i in range(3)]
        norms.append(shard.train(parts, [("logprobs", "entropy")], 0.7, loss, None, recompute)["grad_norm"])
    return losses, norms, {n: t.clone() for n, t in shard.state_dict().items()}


@pytest.mark.thorough
def test_nothing_changes_on_any_layout(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m"))
    for found in run_world(4, _both_ways, path, LAYOUTS, "float32"):
        for layout, losses, norms, worst in found:
            assert losses and norms and worst == 0.0, layout


@pytest.mark.parametrize("kind, overrides, dtype, layouts", thorough_between([
    ("llama", dict(attention_bias=True, mlp_bias=True), "float32", [(1, 2, 1)]), ("gpt2", {}, "float32", [(1, 1, 1)]),
    ("gemma", dict(head_dim=8), "float32", [(1, 1, 2)]), ("qwen3", {}, "bfloat16", [(1, 1, 1), (1, 2, 1)])]))
def test_other_families_and_autocast(tmp_path: Path, kind: str, overrides: dict, dtype: str, layouts: list) -> None:
    path = str(make_model(tmp_path / "m", family=kind, **overrides))
    for found in run_world(2, _both_ways, path, layouts, dtype):
        for layout, losses, norms, worst in found:
            assert losses and norms and worst == 0.0, layout


def _runs_twice(rank, path):
    """How often the first layer's forward runs in a training step, and in a forward pass."""
    shard = _partial(plan_model(path, "causal_lm", Optimizer(lr=1e-2), 4), rank, 1, 1, 1, trainable=True)
    calls = []
    shard.stage.chunks[0].body.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    counts = []
    for recompute in ("none", "full", "none"):
        _train(shard, 0, 1, recompute)
        counts.append(len(calls))
        calls.clear()
    shard.infer([pack(ROWS)], "logprobs", 1.0)
    return counts, len(calls)


def test_layers_run_again_only_where_asked(tmp_path: Path) -> None:
    ((trained, inferred),) = run_world(1, _runs_twice, str(make_model(tmp_path / "m")))
    assert trained == [6, 12, 6] and inferred == 1


def test_the_option_is_read() -> None:
    placed = dict(place_graph(ppo({"actor.train": on(8, 0, 4, recompute="full")}), "", family).placements)
    assert placed["actor.train"].recompute == "full" and placed["critic.train"].recompute == "none"
    assert placed["gen"].recompute == "none"  # only the mesh and degrees are those of the train call


@pytest.mark.parametrize("value", ["ful", "", True, 1, 2.5])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(Failure) as caught:
        place_graph(ppo({"actor.train": on(8, 0, 4, recompute=value)}), "", family)
    (d,) = caught.value.diagnostics
    assert d.code == "RL0311" and "none or full" in d.title and "recompute=full" in d.help


def test_a_computation_has_none() -> None:
    rule = g.Rule("@adv", on(30, 0, 4, recompute="full"), on(30, 0, 4).span)
    with pytest.raises(Failure) as caught:
        place_graph(ppo(rules=(rule,)), "", family)
    assert caught.value.diagnostics[0].code == "RL0311"
