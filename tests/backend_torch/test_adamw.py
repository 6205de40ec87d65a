"""Clipping, AdamW and clearing in one pass (`kernels/adamw.py`): the bits of torch's three, and where they run."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.kernels import adamw, cpu_kernels, kernel_library
from rldsl.backends.torch.kernels.adamw import AdamWStep
from rldsl.models.families import describe, sizes_of
from rldsl.plan.model import Layout, Optimizer, ParamGroup
from rldsl.sharding.layout import degree_product
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged, shard_of
from tests.backend_torch.steps import run
from tests.backend_torch.test_train import OPTIONS as OF_STEPS
from tests.tiny import make_model
from tests.world import run_world

pytestmark = pytest.mark.numeric
one_pass = pytest.mark.skipif(not (kernel_library.available() and adamw.has_torchs_bits()),
                              reason="no C compiler, or torch uses smaller vectors than the processor has")

VECTORS = 64  # elements: a multiple of a CPU's vectors
STEPS = {
    "usual": AdamWStep(1e-3, (0.9, 0.999), 1e-8, 0.0, 1),
    "decay": AdamWStep(3e-2, (0.9, 0.95), 1e-5, 0.1, 1),
    "means that forget": AdamWStep(1.0, (0.4, 0.5), 1e-10, 0.3, 1),
    "half": AdamWStep(1e-6, (0.5, 0.9), 1e-8, 0.0, 1),
    "no mean": AdamWStep(1e-2, (0.0, 0.99), 1e-4, 0.1, 1),
    "means that last": AdamWStep(1e-5, (0.999, 0.9999), 1e-15, 0.1, 1),
}
OPTIONS = Optimizer(lr=5e-3, eps=1e-4, weight_decay=0.1, warmup=1, schedule="linear", clip_grad=0.5,
                    groups=(ParamGroup(("*norm*",), weight_decay=0.0), ParamGroup(("model.layers.1.*",), lr_scale=0.5)))


def gradients(size: int, draw: torch.Generator) -> torch.Tensor:
    """Tiny, huge, zero, and with squares that are 0 or infinite."""
    found = torch.randn(size, generator=draw) * 10.0 ** torch.randint(-30, 21, (size,), generator=draw)
    found[torch.rand(size, generator=draw) < 0.1] = 0.0
    return found


def tensors_of(size: int, draw: torch.Generator) -> list[torch.Tensor]:
    """A parameter, its gradient, mean and square before the first update."""
    return [torch.randn(size, generator=draw), gradients(size, draw), torch.zeros(size), torch.zeros(size)]


def same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Also of zeros with a sign."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))


def in_one_pass(tensors: Sequence[torch.Tensor], step: AdamWStep, factor: float) -> None:
    adamw.update(*tensors, adamw.coefficients(step, factor))


def in_three_passes(tensors: Sequence[torch.Tensor], step: AdamWStep, factor: float) -> None:
    """The reference: torch's operators, on whole vectors."""
    grad, size = tensors[1], tensors[0].numel()
    grad.mul_(factor)
    padded = [F.pad(x.detach().reshape(-1), (0, -size % VECTORS)) for x in tensors]
    p, g, m, s = ([x] for x in padded)
    torch._fused_adamw_(p, g, m, s, [], [torch.tensor(float(step.count))], lr=step.lr, beta1=step.betas[0],
                        beta2=step.betas[1], weight_decay=step.weight_decay, eps=step.eps, amsgrad=False,
                        maximize=False)
    for x, new in zip(tensors, padded, strict=True):
        x.detach().copy_(new[:size].view(x.shape))
    grad.zero_()


# ---------------------------------------------------------------------------------------------------------- the kernel


@one_pass
@pytest.mark.parametrize("factor", [1.0, 0.37, 1e-20])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("sizes", [range(1, 201), [100_003]], ids=["small", "large"])
def test_the_bits_are_torchs(sizes: Sequence[int], name: str, factor: float) -> None:
    draw = torch.Generator().manual_seed(5)
    for size in sizes:
        ours = tensors_of(size, draw)
        torchs = [x.clone() for x in ours]
        for count in (1, 2, 3, 1000):
            for update, tensors in ((in_one_pass, ours), (in_three_passes, torchs)):
                update(tensors, replace(STEPS[name], count=count), factor)
            assert same_bits(ours, torchs), (size, count)
            assert not ours[1].any() and not torch.signbit(ours[1]).any()
            ours[1].copy_(gradients(size, draw))
            torchs[1].copy_(ours[1])


@one_pass
def test_the_bits_are_the_same_on_any_number_of_threads_and_wherever_an_element_is() -> None:
    draw = torch.Generator().manual_seed(7)
    start = tensors_of(100_003, draw)
    threads, found = torch.get_num_threads(), []
    try:
        for count, cuts in ((1, ()), (2, ()), (3, (1,)), (1, (5, 70_001)), (2, (40_000, 40_003))):
            torch.set_num_threads(count)
            whole = [x.clone() for x in start]
            for part in zip(*(x.tensor_split(list(cuts)) for x in whole), strict=True):
                in_one_pass(part, STEPS["decay"], 0.3)
            found.append(whole)
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(each, found[0]) for each in found[1:])


@one_pass
def test_nothing_to_update() -> None:
    nothing = [torch.zeros(0) for _ in range(4)]
    assert adamw.takes(nothing)
    in_one_pass(nothing, STEPS["usual"], 1.0)


# ------------------------------------------------------------------------------------------------- what it leaves alone


@one_pass
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("other", [
    lambda: torch.zeros(4, 6, dtype=torch.bfloat16), lambda: torch.zeros(4, 6, dtype=torch.float64),
    lambda: torch.zeros(6, 4).T, lambda: torch.zeros(4, 12)[:, ::2], lambda: torch.zeros(()).expand(4, 6),
    lambda: torch.zeros(4, 6, device="meta")], ids=["bfloat16", "float64", "transposed", "strided", "freed", "no CPU"])
def test_it_does_not_take(other: Any, place: int) -> None:
    tensors: list[torch.Tensor] = [nn.Parameter(torch.zeros(4, 6)), *(torch.zeros(4, 6) for _ in range(3))]
    assert adamw.takes(tensors)
    tensors[place] = other()
    assert not adamw.takes(tensors)


def test_it_takes_nothing_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    assert not adamw.takes([torch.zeros(4)])


def test_it_takes_nothing_where_torch_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "has_torchs_bits", lambda: False)
    assert not adamw.takes([torch.zeros(4)])


@one_pass
def test_a_trial_finds_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coefficient whose last bit is another."""
    right = adamw.coefficients
    monkeypatch.setattr(adamw, "coefficients", lambda step, factor: right(step, factor * (1 + 2**-23)))
    assert not adamw.has_torchs_bits.__wrapped__()
    monkeypatch.setattr(adamw, "coefficients", right)
    assert adamw.has_torchs_bits.__wrapped__()


@one_pass
def test_a_trial_finds_that_torch_uses_smaller_vectors() -> None:
    """They round each product, where those of AVX2 and AVX-512 fuse some with a sum."""
    if "fma" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("the processor fuses nothing")
    text = "from rldsl.backends.torch.kernels import adamw; print(adamw.has_torchs_bits())"
    done = subprocess.run([sys.executable, "-c", text], env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --------------------------------------------------------------------------------------------------------- whole steps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With sizes that are no multiples of a vector. The gradient of the tied head is kept apart in invariant models."""
    return str(make_model(tmp_path_factory.mktemp("model") / "m", family="qwen3", num_hidden_layers=2,
                          hidden_size=36, intermediate_size=150, tie_word_embeddings=True))


def shard_with(path: str, options: Optimizer, invariant: bool = False) -> Any:
    model = plan_model(path, "causal_lm", options, 10)
    return make_shard(replace(model, invariant=invariant, invariant_training=invariant,
                              sizes=sizes_of(describe(path, "causal_lm"))), 0)


def train(shard: Any, scale: float = 1.0) -> dict[str, float]:
    rows = ragged(8, 46, longest=9)
    leaves = [1, 0, 1] + [0] * 5 if shard.model.invariant_training else ()
    found: dict[str, float] = shard.train([(pack(rows[:5]),), (pack(rows[5:]),)], [("logprobs",)], 0.7,
                                          lambda _, fresh: scale * fresh[0]["logprobs"].square().sum(), leaves=leaves)
    return found


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """The parameters that the kernel updates."""
    seen: list[torch.Tensor] = []
    right = adamw.update
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "update", lambda *given: (seen.append(given[0]), right(*given)))
        yield seen


@contextmanager
def three_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference runs in place of the kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "coefficients", lambda *given: given)
        patch.setattr(adamw, "update", lambda *given: in_three_passes(given[:4], *given[4]))
        yield


def bits(shard: Any) -> list[torch.Tensor]:
    state = shard.optimizer_state()
    return [x.detach().clone() for x in (*shard.state_dict().values(), *state["exp_avg"].values(),
                                         *state["exp_avg_sq"].values())]


@one_pass
@pytest.mark.parametrize("clip", [0.5, 0.0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("invariant", [False, True])
def test_steps_have_the_bits_of_three_passes(tiny: str, invariant: bool, clip: float,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(OPTIONS, clip_grad=clip)
    ours, torchs = shard_with(tiny, options, invariant), shard_with(tiny, options, invariant)
    for _ in range(4):
        with counted(monkeypatch) as seen:
            found = train(ours)
        assert list(map(id, seen)) == list(map(id, ours.trainer.parameters)) and found["grad_norm"] > 0.5
        assert ours.trainer.is_clear and not ours.trainer.grad_buffer.any()
        with three_passes(monkeypatch):
            assert train(torchs) == found
        assert same_bits(bits(ours), bits(torchs))
    assert ours.schedule_state() == {"done": 4, "made": 4}


@one_pass
def test_invariant_models_have_the_same_bits_without_a_compiler_for_it(tiny: str, monkeypatch: pytest.MonkeyPatch
                                                                       ) -> None:
    """So ranks may differ in that; and a shard may go from one to the other, with the counts of torch's optimizer."""
    ours, torchs, both = (shard_with(tiny, OPTIONS, True) for _ in range(3))
    for step in range(4):
        found = train(ours)
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "takes", lambda _: False)
            assert train(torchs) == found
            assert torchs.trainer.grad_buffer.any() and not torchs.trainer.is_clear
            if step % 2:
                assert train(both) == found
        if not step % 2:
            assert train(both) == found
        assert same_bits(bits(ours), bits(torchs)) and same_bits(bits(ours), bits(both))


@pytest.mark.parametrize("options", [
    replace(OPTIONS, kind="sgd"), replace(OPTIONS, kind="sgd", momentum=0.9),
    replace(OPTIONS, kind="adafactor", eps=1e-3)], ids=["sgd", "momentum", "adafactor"])
def test_other_rules_are_clipped_before_and_cleared_later(tiny: str, options: Optimizer,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_with(tiny, options)
    trainer = shard.trainer
    with counted(monkeypatch) as seen:
        norm = train(shard)["grad_norm"]
    assert not seen and not trainer.is_clear
    assert norm > 2 * options.clip_grad
    torch.testing.assert_close(trainer.grad_buffer.norm().item(), options.clip_grad, rtol=1e-4, atol=0)
    trainer.zero_grad()
    assert not trainer.grad_buffer.any()


@one_pass
@pytest.mark.parametrize("options", [
    replace(OPTIONS, kind="muon", momentum=0.95, adamw_lr=1e-3),
    replace(OPTIONS, kind="muon", momentum=0.95, adamw_lr=1e-3, clip_grad=0.0), replace(OPTIONS, kind="adamw_8bit")],
    ids=["muon", "muon, not clipped", "8 bits"])
def test_next_to_another_rule_the_parameters_of_adamw_have_the_bits_of_three_passes(
        tiny: str, options: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings and norms of a model with Muon, small parameters with 8-bit state; the others are clipped before and
    cleared later."""
    ours, torchs, plain = (shard_with(tiny, options) for _ in range(3))
    rules = {name: own.rule for name, own in ours.trainer.optimizer.param_options.items()}
    of_adamw = [p for name, p in ours.trainer.optimizer.parameters.items() if rules[name] == "adamw"]
    assert 0 < len(of_adamw) < len(rules)
    for step in range(3):
        with counted(monkeypatch) as seen:
            found = train(ours)
        assert list(map(id, seen)) == list(map(id, of_adamw)) and not ours.trainer.is_clear
        assert not any(p.grad.any() for p in of_adamw) and ours.trainer.grad_buffer.any()
        with three_passes(monkeypatch):
            assert train(torchs) == found
        assert all_bits(ours, torchs)
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "takes", lambda _: False)
            without = train(plain)
        assert without["grad_norm"] == pytest.approx(found["grad_norm"], rel=1e-5) and without["lr"] == found["lr"]
        assert ours.schedule_state() == plain.schedule_state() == {"done": step + 1, "made": step + 1}
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def all_bits(a: Any, b: Any) -> bool:
    """Of parameters and of the state of each rule."""
    kept = [[*x.state_dict().values(), *(y for kind in x.optimizer_state().values() for y in kind.values())]
            for x in (a, b)]
    return all(torch.equal(x.detach().view(torch.uint8), y.detach().view(torch.uint8))
               for x, y in zip(*kept, strict=True))


@pytest.mark.parametrize("taken", [pytest.param(True, marks=one_pass), False])
def test_an_update_that_is_skipped_changes_nothing_and_its_gradients_are_cleared(
        tiny: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not taken:
        monkeypatch.setattr(adamw, "takes", lambda _: False)
    shard, other = shard_with(tiny, OPTIONS), shard_with(tiny, OPTIONS)
    assert train(shard) == train(other)
    before = bits(shard)
    for bad in (math.nan, math.inf):
        found = train(shard, bad)
        assert not math.isfinite(found["grad_norm"]) and found["lr"] == 0
        assert same_bits(bits(shard), before) and not shard.trainer.grad_buffer.isfinite().all()
    assert train(shard) == train(other)
    assert same_bits(bits(shard), bits(other))


@one_pass
def test_gradients_without_an_update_are_cleared(tiny: str) -> None:
    """A train call that is to stop has computed gradients."""
    shard, other = shard_with(tiny, OPTIONS), shard_with(tiny, OPTIONS)
    assert train(shard) == train(other)
    batch = pack(ragged(3, 46))
    assert shard.train([(batch,)], [("logprobs",)], 1.0, lambda _, fresh: fresh[0]["logprobs"].sum(),
                       should_stop=lambda: True) is None
    assert shard.trainer.grad_buffer.any() and not shard.trainer.is_clear
    assert train(shard) == train(other)
    assert same_bits(bits(shard), bits(other))


@one_pass
@pytest.mark.parametrize("invariant", [False, True])
def test_offloaded_between_steps(tiny: str, invariant: bool) -> None:
    shard, other = shard_with(tiny, OPTIONS, invariant), shard_with(tiny, OPTIONS, invariant)
    for _ in range(3):
        assert train(shard) == train(other)
        shard.offload("optimizer")
        with pytest.raises(RuntimeError, match="offloaded"):
            shard.trainer.optimizer.step_in_one_pass(1e-3, 1.0)
        shard.onload("optimizer")()
        assert shard.trainer.is_clear and not shard.trainer.grad_buffer.any()
    assert same_bits(bits(shard), bits(other))


@one_pass
def test_all_that_is_not_frozen(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_with(tiny, replace(OPTIONS, freeze=("model.embed_tokens.*", "model.layers.0.*")))
    fixed = {n: x.clone() for n, x in shard.state_dict().items() if n.startswith(("model.embed", "model.layers.0."))}
    with counted(monkeypatch) as seen:
        train(shard)
    assert len(seen) == len(shard.trainer.parameters) < len(shard.state_dict())
    assert fixed and all(torch.equal(shard.state_dict()[n], x) for n, x in fixed.items())


DENSE = (dict(family="qwen3", tie_word_embeddings=True, intermediate_size=50),
         [at(dp=2, zero=1), at(dp=2, zero=3), at(pp=2)])
EXPERTS = (dict(family="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=18),
           [at(dp=2, ep=2), at(dp=2, ep=2, zero=3)])


@one_pass
@pytest.mark.parametrize("sizes, layouts", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_bits_of_three_passes_on_every_layout(sizes: dict[str, Any], layouts: list[Layout], tmp_path: Path) -> None:
    """Of rows, slices, stages and experts of two ranks."""
    path = str(make_model(tmp_path / "m", num_hidden_layers=2, **sizes))
    assert not sum(run_world(max(map(degree_product, layouts)), differing, path, layouts), [])


def differing(rank: int, path: str, layouts: list[Layout]) -> list[str]:
    """The layouts in which this rank has other bits after three steps."""
    wrong = []
    for layout in layouts:
        found = []
        for reference in (False, True):
            made = shard_of(plan_model(path, "causal_lm", OF_STEPS, 6), layout, rank, True)
            assert made is not None
            with pytest.MonkeyPatch.context() as patch, three_passes(patch) if reference else nullcontext():
                norms = run(made[0], "logprobs", made[1], layout.dp)
            found.append([torch.tensor(norms), *bits(made[0])])
            assert made[0].trainer.is_clear and not made[0].trainer.grad_buffer.any()
        if not same_bits(*found):
            wrong.append(repr(layout))
    return wrong
