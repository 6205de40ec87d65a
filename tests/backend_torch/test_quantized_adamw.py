"""AdamW with 8-bit state: against the formula written plainly, and against torchao's where its wheel is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.memory.parameters import Copy, largest_step, optimizer_state
from rldsl.plan.model import Optimizer, ParamGroup
from rldsl.sharding.boxes import Cell
from tests.backend_torch.shards import layout_of, make_shard, plan_model
from tests.tiny import make_model

OPTIONS = Optimizer(lr=5e-3, eps=1e-6, weight_decay=0.1, warmup=3, schedule="linear", clip_grad=0.5, kind="adamw_8bit",
                    groups=(ParamGroup(("*.layers.1.*",), lr_scale=0.5, weight_decay=0.0),))
STEPS, BLOCK = 20, 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its MLPs have 36 whole blocks each; what else it has is too small to be quantized."""
    return str(make_model(tmp_path_factory.mktemp("model") / "m", family="qwen3", num_hidden_layers=2, hidden_size=64,
                          intermediate_size=144))


def values(signed: bool) -> torch.Tensor:
    """The 256 values of a code: seven decades below 1, of which each has twice as many as the one below."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = (1 if signed else 2) << decade
        found += [10 ** (decade - 6) * (0.1 + 0.9 * (i + 0.5) / count) for i in range(count)]
    if signed:
        found += [-x for x in found if x not in (0.0, 1.0)]
    return torch.tensor(sorted(found))


def rounded(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What is left of a moment, and the nearest code, found by comparing with all of them."""
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(1, keepdim=True)
    codes = ((flat / scale)[..., None] - values(signed)).abs().argmin(-1)
    back = values(signed)[codes] * scale
    return back.flatten()[: x.numel()].view(x.shape), codes.flatten()[: x.numel()].view(x.shape)


def steps(shard: Any, after: Any = lambda step, rate, grads: None) -> None:
    """STEPS updates with gradients too small for clipping, in whose blocks magnitudes differ."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        grads = {}
        for name, parameter in shard.stage.parameters.items():
            spread = 10 ** (4 * torch.rand(parameter.shape, generator=generator) - 7)
            grads[name] = torch.randn(parameter.shape, generator=generator) * spread
            parameter.grad.copy_(grads[name])
        after(step, shard.trainer.step()["lr"], grads)


def test_twenty_steps_are_those_of_the_formula(tiny: str) -> None:
    shard: Any = make_shard(plan_model(tiny, "causal_lm", OPTIONS, STEPS), 0)
    mine = {n: p.detach().clone() for n, p in shard.stage.parameters.items()}
    moments = {n: [torch.zeros_like(p), torch.zeros_like(p)] for n, p in mine.items()}
    codes: dict[str, list[torch.Tensor]] = {}

    def follow(step: int, rate: float, grads: dict[str, torch.Tensor]) -> None:
        for name, p in mine.items():
            own, decay = (0.5 * rate, 0.0) if ".layers.1." in name else (rate, 0.1)
            m = 0.9 * moments[name][0] + 0.1 * grads[name]
            v = 0.999 * moments[name][1] + 0.001 * grads[name] ** 2
            update = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6)
            mine[name] = p * (1 - own * decay) - own * update
            if p.numel() >= 4096:
                (moments[name][0], first), (moments[name][1], second) = rounded(m, True), rounded(v, False)
                codes[name] = [first, second]
            else:
                moments[name] = [m, v]

    steps(shard, follow)
    state = shard.optimizer_state()
    assert set(codes) == set(state["exp_avg_codes"]) == {n for n, p in mine.items() if p.numel() >= 4096}
    assert set(mine) == set(codes) | set(state["exp_avg"])
    for name, p in shard.stage.parameters.items():
        moved = (p - mine[name]).abs()
        # a moment in the middle of two values may become the other one
        assert (moved > 1e-6).sum() <= p.numel() // 1000 and moved.max() < OPTIONS.lr / 10, name
        for kind, expected in zip(("exp_avg_codes", "exp_avg_sq_codes"), codes.get(name, ())):
            difference = (state[kind][name].long() - expected).abs()
            assert difference.max() <= 1 and (difference > 0).sum() <= p.numel() // 1000, name


def test_twenty_steps_are_those_of_torchao(tiny: str) -> None:
    """But for single moments that lie in the middle of two codes."""
    torchao = pytest.importorskip("torchao.optim")
    options = replace(OPTIONS, groups=())
    shard: Any = make_shard(plan_model(tiny, "causal_lm", options, STEPS), 0)
    mine = {n: torch.nn.Parameter(p.detach().clone()) for n, p in shard.stage.parameters.items()}
    theirs = torchao.AdamW8bit(list(mine.values()), lr=1.0, betas=options.betas, eps=options.eps,
                               weight_decay=options.weight_decay)

    def follow(step: int, rate: float, grads: dict[str, torch.Tensor]) -> None:
        for name, p in mine.items():
            p.grad = grads[name]
        theirs.param_groups[0]["lr"].fill_(rate)
        with torch.compiler.set_stance("force_eager"):
            theirs.step()

    steps(shard, follow)
    state = shard.optimizer_state()
    quantized = 0
    for name, p in shard.stage.parameters.items():
        moved, its = (p - mine[name]).abs(), theirs.state[mine[name]]
        assert (moved > 1e-6).sum() <= p.numel() // 1000 and moved.max() < options.lr / 10, name
        for kind in ("exp_avg", "exp_avg_sq"):
            if hasattr(its[kind], "codes"):
                different = (state[f"{kind}_codes"][name] != its[kind].codes).sum()
                assert different <= p.numel() // 1000, (name, kind)
                torch.testing.assert_close(state[f"{kind}_scales"][name], its[kind].scale, atol=0, rtol=1e-5)
                quantized += 1
    assert quantized == 12


def test_resumed_in_the_middle_bit_for_bit(tiny: str) -> None:
    """By another shard, from what a checkpoint has."""
    model = plan_model(tiny, "causal_lm", OPTIONS, STEPS)
    whole: Any = make_shard(model, 0)
    steps(whole)
    first: Any = make_shard(model, 0)
    second: Any = make_shard(model, 0)

    class Both:
        """The first shard until half of the steps, then the second."""

        stage, trainer = first.stage, first.trainer

    def change(step: int, rate: float, grads: dict[str, torch.Tensor]) -> None:
        if step == STEPS // 2:
            for to, source in ((second.state_dict(), first.state_dict()),
                               *((second.optimizer_state()[kind], tensors)
                                 for kind, tensors in first.optimizer_state().items())):
                assert to.keys() == source.keys()
                for name, tensor in source.items():
                    to[name].copy_(tensor)
            second.load_schedule_state(first.schedule_state())
            Both.stage, Both.trainer = second.stage, second.trainer

    steps(Both, change)
    for name, p in whole.stage.parameters.items():
        assert torch.equal(p, second.stage.parameters[name]), name
    for kind, tensors in whole.optimizer_state().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second.optimizer_state()[kind][name]), (kind, name)


def test_memory_is_counted_in_bytes(tiny: str) -> None:
    """As many as the state has: two bytes per element and two scales per block of what is quantized."""
    model = plan_model(tiny, "causal_lm", OPTIONS, STEPS)
    shard: Any = make_shard(model, 0)
    steps(shard)
    kept = sum(t.numel() * t.element_size() for k in shard.optimizer_state().values() for t in k.values())
    copy = Copy(model, layout_of(), Cell(0, 0))
    large = 6 * 144 * 64
    small = sum(p.numel() for p in shard.stage.parameters.values()) - large
    assert optimizer_state(copy) == kept == 8 * small + 2 * large + 8 * large // BLOCK
    assert largest_step(copy) == 48 * 144 * 64


def test_a_gradient_of_zeros_leaves_a_moment_of_zeros(tmp_path: Path, tiny: str) -> None:
    """A block without a largest value is no division by zero, and weight decay continues."""
    shard: Any = make_shard(plan_model(tiny, "causal_lm", replace(OPTIONS, groups=()), STEPS), 0)
    before = {n: t.clone() for n, t in shard.state_dict().items()}
    for parameter in shard.stage.parameters.values():
        parameter.grad.zero_()
    rate = shard.trainer.step()["lr"]
    for name, p in shard.stage.parameters.items():
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * rate), atol=1e-7, rtol=1e-6)
    assert all(t.count_nonzero() == 0 for t in shard.optimizer_state()["exp_avg_scales"].values())
