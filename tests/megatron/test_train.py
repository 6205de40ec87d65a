"""Optimizer steps on Megatron against one process with plain transformers, autograd and torch's AdamW; half precision
and where memory lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.plan.model import Layout
from tests.backend_torch import shards
from tests.backend_torch.shards import pack, plan_model
from tests.backend_torch.steps import check, run
from tests.backend_torch.test_train import OPTIONS, ROWS, UPDATES
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import make, needed, on_cpu, shard_of
from tests.samples import thorough_between
from tests.world import run_world

needed()
SOME = [at(tp=2, pp=2), at(dp=2, cp=2), at(dp=2, pp=2, zero=1)]


@pytest.mark.thorough
@pytest.mark.parametrize("name, kind, what, layouts", [
    ("qwen3", "causal_lm", "logprobs", SOME), ("qwen2", "causal_lm", "logprobs", SOME[:1]),
    ("linear", "value_model", "values", SOME[:1]), ("qwen3_moe", "causal_lm", "logprobs", [at(dp=2, tp=2, ep=2)])])
def test_steps_equal_one_process(name: str, kind: str, what: str, layouts: list[Layout], tmp_path: Path) -> None:
    """Clipped, with rows that do not divide evenly among shards."""
    check(make(tmp_path, name), kind, what, layouts, shard_of)


def halves(rank: int, path: str, layouts: list[Layout]) -> list[Any]:
    """Norms and parameters after two steps. As arrays: a tensor would be shared by a process that has ended."""
    found = []
    for layout in layouts:
        on_cpu()
        made = shards.shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES, "bfloat16"), layout, rank, True)
        if made is not None:
            norms = run(made[0], "logprobs", made[1], layout.dp, 2)
            assert all(t.dtype == torch.float32 for t in made[0].state_dict().values())
            found.append((layout, norms, {n: t.numpy(force=True) for n, t in made[0].state_dict().items()}))
    return found


@pytest.mark.thorough
def test_halves_are_those_of_the_torch_backend(tmp_path: Path) -> None:
    """Matrices multiply in half precision; gradients and parameters are float32."""
    path = make(tmp_path, "qwen3")
    (_, norms, plain), (_, alone, mine), *divided = run_world(2, halves, path, [
        shards.layout_of(), at(), at(tp=2), at(pp=2), at(dp=2), at(dp=2, zero=1)])[0]
    assert alone == pytest.approx(norms, rel=1e-2)
    apart = [abs(mine[n] - plain[n]).mean() for n in plain]
    assert max(apart) < 1e-3 * OPTIONS.lr / 5e-3, apart
    for layout, seen, _ in divided:
        assert seen == pytest.approx(norms, rel=1e-2), layout


def copied(rank: int, path: str, layouts: list[Layout]) -> list[bool]:
    """Whether a copy in half precision has the log-probs of the float32 parameters at home, bit by bit."""
    found = []
    for layout in layouts:
        made = [shard_of(plan_model(path, "causal_lm", options, UPDATES, "bfloat16"), layout, rank, options is not None)
                for options in (OPTIONS, None)]
        if made[0] is not None:
            home, copy = (shard.infer([pack(ROWS)], "logprobs", 1.0) for shard, _ in made)
            kinds = [{t.dtype for t in shard.state_dict().values()} for shard, _ in made]
            found.append(kinds == [{torch.float32}, {torch.bfloat16}] and torch.equal(home, copy))
    return found


@pytest.mark.parametrize("name", thorough_between(["qwen3", "qwen2", "llama", "mixtral"]))  # two of them with biases
def test_a_copy_in_half_precision_computes_as_its_home(name: str, tmp_path: Path) -> None:
    assert run_world(2, copied, make(tmp_path, name), [at(), at(tp=2)]) == [[True, True], [True]]


def small(rank: int, path: str) -> tuple[float, float]:
    """Of one step that is too small for bfloat16: the parts of all elements that change, in float32 and rounded."""
    on_cpu()
    options = replace(OPTIONS, lr=1e-7, weight_decay=0.0, warmup=0)
    shard, _ = shard_of(plan_model(path, "causal_lm", options, UPDATES, "bfloat16"), at(tp=2), rank, True)
    before = {n: t.clone() for n, t in shard.state_dict().items()}
    shard.train([(pack(ROWS),)], [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum() * 0.1)
    pairs = [(t, before[n]) for n, t in shard.state_dict().items()]
    count = sum(t.numel() for t, _ in pairs)
    return (sum(int((t != b).sum()) for t, b in pairs) / count,
            sum(int((t.bfloat16() != b.bfloat16()).sum()) for t, b in pairs) / count)


def test_parameters_at_home_are_float32(tmp_path: Path) -> None:
    for full, rounded in run_world(2, small, make(tmp_path, "qwen3")):
        assert full > 0.5 and rounded < 0.01


def moved(rank: int, path: str) -> bool:
    """What is offloaded and comes back, or given up and claimed again, is still one memory on both sides."""
    shard, _ = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES), at(tp=2), rank, True)
    before = run(shard, "logprobs", 0, 1, 1)
    for what in ("optimizer", "parameters"):
        shard.offload(what)
        shard.onload(what)()
    values = {name: t.clone() for name, t in shard.state_dict().items()}
    shard.free()
    shard.allocate()
    for name, tensor in shard.state_dict().items():
        tensor.copy_(values[name])
    other, _ = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES), at(tp=2), rank, True)
    run(other, "logprobs", 0, 1, 1)
    batch = [pack(ROWS[:6])]
    same = torch.equal(shard.infer(batch, "logprobs", 1.0), other.infer(batch, "logprobs", 1.0))
    other.alias(shard)
    shard.state_dict()["lm_head.weight"].zero_()
    return same and before[0] > 0 and not other.state_dict()["lm_head.weight"].any()


def test_memory_moves_and_stays_one(tmp_path: Path) -> None:
    assert run_world(2, moved, make(tmp_path, "qwen3")) == [True, True]
