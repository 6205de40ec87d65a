"""Gradients and optimizer steps on Megatron against one process with plain transformers, autograd and torch's AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.plan.boxes import local_slice, slices
from rldsl.plan.layout import degree_product
from rldsl.plan.model import Layout
from tests.backend_torch.shards import pack, plan_model
from tests.backend_torch.test_train import OPTIONS, ROWS, UPDATES, minibatch, reference, share
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import needed, shard_of
from tests.megatron.test_forward import make
from tests.world import run_world
from tests.zero.test_steps import difference, run

needed()
EVERY = [at(), at(dp=2), at(tp=2), at(pp=2), at(cp=2), at(tp=2, pp=2), at(dp=2, tp=2), at(cp=2, tp=2), at(pp=2, vpp=2),
         at(tp=4), at(dp=2, zero=1), at(dp=2, tp=2, zero=1)]
SOME = [at(tp=2, pp=2), at(dp=2, cp=2), at(dp=2, pp=2, zero=1)]
MIXED = [at(), at(dp=2), at(tp=2), at(pp=2), at(dp=2, ep=2), at(dp=2, tp=2, ep=2), at(dp=4, ep=2), at(dp=2, cp=2),
         at(dp=2, zero=1), at(dp=4, ep=2, zero=1)]


def gradients(rank: int, path: str, layouts: list[Layout], expected: Any) -> list[Any]:
    """The largest difference of an element of any gradient, as a part of the parameter's largest, on each layout."""
    model, found = plan_model(path, "causal_lm", replace(OPTIONS, clip_grad=0.0), UPDATES), []
    for layout in layouts:
        made = shard_of(model, layout, rank, True)
        if made is None:
            continue
        shard, mine = made
        rows = minibatch(0)[mine :: layout.dp]
        parts = [rows[i::2] for i in range(2)]  # as many on every shard

        def loss(i: int, fresh: Any, parts: list[list[int]] = parts) -> torch.Tensor:
            sizes = [len(ROWS[r][1]) for r in parts[i]]
            return sum(share(f.square()) for f in fresh[0]["logprobs"].split(sizes))

        shard.train([(pack([ROWS[r] for r in part]),) for part in parts], [("logprobs",)], 0.7, loss)
        worst = 0.0
        for name, (parameter, pieces) in shard.stage.held.items():
            for p in pieces:
                mine_ = shard.stage.parameters[name].grad[local_slice(p, p.box, parameter.dim)]
                right = expected[name]
                worst = max(worst, float((mine_ - right[slices(p.box)]).abs().max() / right.abs().max()))
        found.append((layout, worst))
    return found


def plainly(path: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for row in minibatch(0):
        prompt, response = ROWS[row]
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0][len(prompt) - 1 : -1]
        every, targets = (model.lm_head(hidden) / 0.7).log_softmax(-1), torch.tensor(response, dtype=torch.long)
        share(every.gather(1, targets[:, None])[:, 0].square()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama_biases", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    path = make(tmp_path, name)
    layouts = EVERY if name == "qwen3" else MIXED if name == "mixtral" else SOME
    results = run_world(max(map(degree_product, layouts)), gradients, path, layouts, plainly(path))
    for layout, worst in (found for rank in results for found in rank):
        assert worst < 1e-5, layout


def steps(rank: int, path: str, kind: str, what: str, layouts: list[Layout], expected: Any) -> list[Any]:
    """Layers are computed again in the backward pass where dp is 2."""
    found = []
    for layout in layouts:
        made = shard_of(plan_model(path, kind, OPTIONS, UPDATES), layout, rank, True)
        if made is not None:
            norms = run(made[0], what, made[1], layout.dp, recompute="full" if layout.dp == 2 else "none")
            found.append((layout, difference(made[0], expected), norms))
    return found


@pytest.mark.parametrize("name, kind, what, layouts", [
    ("qwen3", "causal_lm", "logprobs", SOME), ("qwen2", "causal_lm", "logprobs", SOME[:1]),
    ("linear_rope", "value_model", "values", SOME[:1]), ("qwen3_moe", "causal_lm", "logprobs", [at(dp=2, tp=2, ep=2)])])
def test_steps_equal_one_process(name: str, kind: str, what: str, layouts: list[Layout], tmp_path: Path) -> None:
    """The last step has one row, so that some shards have none; and the norm is clipped."""
    path = make(tmp_path, name)
    expected, norms = reference(path, what)
    results = run_world(4, steps, path, kind, what, layouts, expected)
    for layout, worst, seen in (found for rank in results for found in rank):
        assert worst < 1e-5, layout
        assert seen == pytest.approx(norms, rel=1e-4), layout


def halves(rank: int, path: str, layouts: list[Layout]) -> list[Any]:
    found = []
    for layout in layouts:
        made = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES, "bfloat16"), layout, rank, True)
        if made is not None:
            assert all(t.dtype == torch.float32 for t in made[0].tensors().values())
            found.append(run(made[0], "logprobs", made[1], layout.dp, 2))
    return found


def test_halves(tmp_path: Path) -> None:
    """Matrices multiply in half precision, and gradients are those of float32 parameters."""
    path = make(tmp_path, "qwen3")
    norms = reference(path, "logprobs")[1][:2]
    for seen in (found for rank in run_world(2, halves, path, [at(), at(tp=2), at(pp=2)]) for found in rank):
        assert seen == pytest.approx(norms, rel=0.1)


def moved(rank: int, path: str) -> bool:
    """What is offloaded and comes back, or given up and claimed again, is still one memory on both sides."""
    shard, _ = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES), at(tp=2), rank, True)
    before = run(shard, "logprobs", 0, 1, 1)
    for what in ("optimizer", "parameters"):
        shard.offload(what)
        shard.onload(what)()
    values = {name: t.clone() for name, t in shard.tensors().items()}
    shard.release()
    shard.claim()
    for name, tensor in shard.tensors().items():
        tensor.copy_(values[name])
    other, _ = shard_of(plan_model(path, "causal_lm", OPTIONS, UPDATES), at(tp=2), rank, True)
    run(other, "logprobs", 0, 1, 1)
    batch = [pack(ROWS[:6])]
    same = torch.equal(shard.infer(batch, "logprobs", 1.0), other.infer(batch, "logprobs", 1.0))
    other.share(shard)
    shard.tensors()["lm_head.weight"].zero_()
    return same and before[0] > 0 and not other.tensors()["lm_head.weight"].any()


def test_memory_moves_and_stays_one(tmp_path: Path) -> None:
    assert run_world(2, moved, make(tmp_path, "qwen3")) == [True, True]
