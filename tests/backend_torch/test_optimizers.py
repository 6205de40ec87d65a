"""torch's own optimizers: bit for bit on one rank, and on every layout given equal gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rldsl.plan.model import Layout, Model, Optimizer, ParamGroup
from rldsl.plan.optimizers import COMPLETE_STATE, NEEDS_COMPLETE
from rldsl.sharding.boxes import local_slice, slices
from rldsl.sharding.layout import degree_product
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import make_shard, plan_model, shard_of
from tests.backend_torch.steps import run
from tests.backend_torch.test_train import UPDATES
from tests.tiny import make_model
from tests.world import run_world

BASE = Optimizer(lr=5e-3, eps=1e-4, weight_decay=0.1, warmup=1, schedule="linear", clip_grad=0.5)
GROUPS = (ParamGroup(("*norm*",), weight_decay=0.0), ParamGroup(("model.layers.1.*",), lr_scale=0.5))
OPTIMIZERS = {
    "adamw": replace(BASE, groups=GROUPS),
    "sgd": replace(BASE, kind="sgd"),
    "nesterov": replace(BASE, kind="sgd", momentum=0.9, nesterov=True, decay="matrices"),
    "adafactor": replace(BASE, kind="adafactor", eps=1e-3, groups=GROUPS),
    "muon": replace(BASE, kind="muon", momentum=0.95, nesterov=True, adamw_lr=1e-3, groups=GROUPS),
    "muon, plain": replace(BASE, kind="muon", momentum=0.9, adjust_lr="match_rms_adamw", ns_steps=3),
}
EIGHT_BIT = replace(BASE, kind="adamw_8bit", groups=GROUPS)  # not one of torch's
STEPS = 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model") / "m", family="qwen3", num_hidden_layers=2))


def torch_optimizers(o: Optimizer, named: dict[str, torch.nn.Parameter]) -> list[tuple[torch.optim.Optimizer, float]]:
    """What one would write with torch alone, and the factors of their learning rates. One optimizer for each way in
    which parameters are updated."""
    made: list[tuple[torch.optim.Optimizer, float]] = []
    for name, p in named.items():
        scale = 0.5 if o.groups and name.startswith("model.layers.1.") else 1.0
        decay = 0.0 if "norm" in name and (o.groups or o.decay == "matrices") else o.weight_decay
        if o.kind == "sgd":
            made.append((torch.optim.SGD([p], lr=1, momentum=o.momentum, nesterov=o.nesterov, weight_decay=decay,
                                         fused=True), scale))
        elif o.kind == "adafactor":
            made.append((torch.optim.Adafactor([p], lr=1, eps=(None, 1e-3), weight_decay=decay), scale))
        elif o.kind == "muon" and ".layers." in name and p.dim() == 2:
            made.append((torch.optim.Muon([p], lr=1, momentum=o.momentum, nesterov=o.nesterov, ns_steps=o.ns_steps,
                                          weight_decay=decay, adjust_lr_fn=o.adjust_lr), scale))
        else:
            scale *= 0.2 if o.adamw_lr else 1.0
            made.append((torch.optim.AdamW([p], lr=1, eps=o.eps, weight_decay=decay, fused=True), scale))
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_are_those_of_torch_bit_for_bit(tiny: str, name: str) -> None:
    """Resumed in the middle by another shard, from what a checkpoint has. Both sides get the same gradients."""
    options = replace(OPTIMIZERS[name], warmup=3)
    model = plan_model(tiny, "causal_lm", options, STEPS)
    shard: Any = make_shard(model, 0)
    reference = {n: torch.nn.Parameter(p.detach().clone()) for n, p in shard.stage.parameters.items()}
    optimizers = torch_optimizers(options, reference)
    for step in range(STEPS):
        if step == STEPS // 2:
            other: Any = make_shard(model, 0)
            for mine, theirs in ((other.state_dict(), shard.state_dict()),
                                 *((other.optimizer_state()[kind], tensors)
                                   for kind, tensors in shard.optimizer_state().items())):
                assert mine.keys() == theirs.keys()
                for n, tensor in theirs.items():
                    mine[n].copy_(tensor)
            other.load_schedule_state(shard.schedule_state())
            shard = other
        generator = torch.Generator().manual_seed(step)
        for n, p in shard.stage.parameters.items():
            p.grad.copy_(torch.randn(p.shape, generator=generator) * 1e-3)  # too small for clipping
            reference[n].grad = p.grad.clone()
        rate = shard.trainer.step()["lr"]
        for optimizer, scale in optimizers:
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
        for n, p in shard.stage.parameters.items():
            assert torch.equal(p, reference[n]), (n, step)
    assert shard.schedule_state() == {"done": STEPS, "made": STEPS}


def updated(shard: Any) -> dict[str, torch.Tensor]:
    """Two updates with gradients that are a function of the element of the model."""
    for step in range(2):
        for name, parameter in shard.stage.parameters.items():
            record, pieces = shard.stage.held[name]
            generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
            whole = torch.randn(record.spec.shape, generator=generator)
            if parameter.grad is not None:
                for p in pieces:
                    parameter.grad[local_slice(p, p.box, record.dim)] = whole[slices(p.box)]
        shard.trainer.optimizer.step(1e-2 / (1 + step))
    return shard.state_dict()


def placed(rank: int, models: list[Model], layouts: list[Layout], expected: list[dict[str, torch.Tensor]],
           states: list[dict[str, dict[str, torch.Tensor]]]) -> list[str]:
    """What differs from one process."""
    wrong = []
    for layout in layouts:
        for model, weights, kept in zip(models, expected, states):
            made = shard_of(model, layout, rank, True)
            if made is None:
                continue
            shard: Any = made[0]
            updated(shard)
            parts = {"weight": (weights, shard.state_dict()),
                     **{kind: (kept[kind], tensors) for kind, tensors in shard.optimizer_state().items()}}
            for part, (wanted, found) in parts.items():
                for name, tensor in found.items():
                    record, pieces = shard.stage.held[name]
                    exact = shard.trainer.optimizer.param_options[name].rule in (*NEEDS_COMPLETE, "adamw_8bit")
                    pairs = [(tensor, wanted[name])]
                    if part not in COMPLETE_STATE:
                        pairs = [(tensor[local_slice(p, p.box, record.dim)], wanted[name][slices(p.box)])
                                 for p in pieces]
                    # torch's elementwise kernels round the end of a tensor in another way than its beginning
                    if not all(torch.equal(*pair) if exact else torch.allclose(*pair, atol=1e-6) for pair in pairs):
                        wrong.append(f"{model.optimizer.kind} {layout} {part} {name}")
    return wrong


COMPLETE = ("nesterov", "adafactor", "muon")


@pytest.mark.thorough
@pytest.mark.parametrize("names, family, overrides, layouts", [
    (COMPLETE, "qwen3", dict(num_hidden_layers=2),
     [at(tp=4), at(dp=4, zero=3), at(dp=2, tp=2, zero=1), at(dp=2, pp=2, zero=3)]),
    (COMPLETE, "qwen3_moe", dict(num_hidden_layers=1, num_experts=4), [at(dp=4, ep=2, zero=3), at(dp=2, ep=2, tp=2)]),
    # blocks of 256 elements end inside the parts of ranks, and the last of a parameter is shorter
    (("adamw_8bit",), "qwen3", dict(num_hidden_layers=2, intermediate_size=148),
     [at(tp=4), at(dp=4, zero=3), at(dp=2, tp=2, zero=1), at(dp=2, pp=2, zero=3)]),
    (("adamw_8bit",), "qwen3_moe", dict(num_hidden_layers=1, num_experts=4, moe_intermediate_size=44),
     [at(dp=4, ep=2, zero=3), at(dp=2, ep=2, tp=2), at(dp=2, ep=2)]),
], ids=["dense", "experts", "8-bit state", "8-bit state of experts"])
def test_divided_updates_are_those_of_one_process_bit_for_bit(tmp_path: Path, names: tuple[str, ...], family: str,
                                                              overrides: dict[str, Any],
                                                              layouts: list[Layout]) -> None:
    path = str(make_model(tmp_path / "m", family=family, **overrides))
    models = [plan_model(path, "causal_lm", (OPTIMIZERS | {"adamw_8bit": EIGHT_BIT})[name], UPDATES)
              for name in names]
    expected, states = [], []
    for model in models:
        shard: Any = make_shard(model, 0)
        expected.append({n: t.clone() for n, t in updated(shard).items()})
        states.append({k: {n: t.clone() for n, t in x.items()} for k, x in shard.optimizer_state().items()})
    assert ("exp_avg_codes" in states[0]) == ("adamw_8bit" in names)
    assert not sum(run_world(max(map(degree_product, layouts)), placed, models, layouts, expected, states), [])


def test_what_is_frozen_stays_and_nothing_is_kept_about_it(tiny: str) -> None:
    """The rest moves as it does where torch freezes the same parameters, which have no part in the norm."""
    options = replace(BASE, freeze=("model.embed_tokens.*", "model.layers.0.*"))
    found = sum(run_world(2, frozen_steps, tiny, options, [at(), at(dp=2, zero=1), at(dp=2, zero=3), at(pp=2)]), [])
    weights, norms, _ = found[0]
    before = make_shard(plan_model(tiny, "causal_lm", options, UPDATES), 0).state_dict()
    fixed = {n for n in before if n.startswith(("model.embed_tokens.", "model.layers.0."))}
    assert fixed and fixed < set(before)
    for name, tensor in before.items():
        assert np.array_equal(weights[name], tensor.numpy()) == (name in fixed), name
    for other, other_norms, kept in found:
        assert not kept & fixed
        assert other_norms == pytest.approx(norms, rel=1e-4)
        for name, tensor in other.items():
            if tensor.shape == weights[name].shape:
                np.testing.assert_allclose(tensor, weights[name], atol=1e-5, rtol=0)


def frozen_steps(rank: int, path: str, options: Optimizer,
                 layouts: list[Layout]) -> list[tuple[dict[str, np.ndarray], list[float], set[str]]]:
    found = []
    for layout in layouts:
        made = shard_of(plan_model(path, "causal_lm", options, UPDATES), layout, rank, True)
        if made is not None:
            norms = run(made[0], "logprobs", made[1], layout.dp)
            kept = {n for tensors in made[0].optimizer_state().values() for n in tensors}
            weights = {n: t.detach().numpy().copy() for n, t in made[0].state_dict().items()}  # torch would send handles
            found.append((weights, norms, kept))
    return found


