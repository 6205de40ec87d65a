"""Routers that multiply in float32 in transformers' models of half precision do so here, under autocast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rldsl.backends.torch.model import stage
from rldsl.backends.torch.model.autocast import keep_float32_products
from rldsl.backends.torch.model.skeleton import empty_model
from rldsl.models.families import describe
from rldsl.models.float32_products import multiplies_in_float32
from rldsl.plan.model import Optimizer
from rldsl.sharding.boxes import expand_specs
from rldsl.sharding.dtypes import float32_specs
from tests.backend_torch.shards import layout_of, pack, plan_model, shard_of
from tests.backend_torch.test_forward import ROWS
from tests.families.tiny_configs import make

ROUTER = "layers.1.mlp.gate"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("routers") / "m", "deepseek_v3")


def router_of(path: str, dtype: str = "bfloat16") -> tuple[Any, Any]:
    """(shard, its router)"""
    shard = shard_of(plan_model(path, dtype=dtype), layout_of(), 0, False)[0]
    return shard, shard.stage.chunks[0].body.get_submodule(ROUTER)


def routed(shard: Any, router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logits, weights, chosen experts)"""
    with shard._numerics(), torch.no_grad():
        return router(hidden)


def transformers_router(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    router = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).get_submodule(f"model.{ROUTER}")
    assert router.e_score_correction_bias.dtype == torch.float32
    return router


def hidden_states(size: int) -> torch.Tensor:
    return torch.randn(1, 500, size, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_experts_are_chosen_as_by_transformers(path: str) -> None:
    """Of equal hidden states: scores, weights and choices are equal, bit for bit."""
    theirs, (shard, ours) = transformers_router(path), router_of(path)
    hidden = hidden_states(theirs.hidden_dim)
    right, found = theirs(hidden), routed(shard, ours, hidden.float())
    assert all(torch.equal(a, b) for a, b in zip(right, found, strict=True)) and found[0].dtype == torch.float32


def test_under_plain_autocast_others_are_chosen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "keep_float32_products", lambda *_: frozenset())
    theirs, (shard, ours) = transformers_router(path), router_of(path)
    hidden = hidden_states(theirs.hidden_dim)
    (right, _, chosen), (found, _, others) = theirs(hidden), routed(shard, ours, hidden.float())
    assert not torch.equal(right, found.float()) and not torch.equal(chosen.sort(-1)[0], others.sort(-1)[0])


@pytest.mark.parametrize("family, wide", [
    ("deepseek_v3", True), ("glm4_moe", True), ("dots1", True), ("hy_v3", True), ("longcat_flash", True),
    ("hunyuan_v1_moe", True), ("qwen3_moe", False), ("mixtral", False), ("qwen3_next", False), ("minimax_m2", False),
    ("llama", False)])
def test_which_modules_multiply_in_float32(family: str, wide: bool, tmp_path: Path) -> None:
    """As transformers' code of each family says: those of Qwen and Mixtral multiply in half precision there, too.
    Hunyuan's do so where their weights are float32, which they are in transformers."""
    from transformers import AutoConfig

    path = make(tmp_path / "m", family)
    model, _ = empty_model(AutoConfig.from_pretrained(path))
    float32 = {p.name for p in expand_specs(float32_specs(describe(path, "causal_lm").params), 4)}
    names = keep_float32_products(model, CPU, float32)
    assert bool(names) == wide and all(name.endswith(("gate", "gate.wg", "router", "router.classifier"))
                                       for name in names)
    assert family != "hunyuan_v1_moe" or not keep_float32_products(model, CPU)


@pytest.mark.parametrize("family, place, matrix", [
    ("hy_v3", "layers.1.mlp.gate", "weight"), ("longcat_flash", "layers.1.mlp.router", "classifier.weight"),
    ("hunyuan_v1_moe", "layers.1.mlp.gate", "wg.weight"), ("beam", "layers.3.mlp.gate", "weight")])
def test_routers_that_need_more_choose_as_those_of_transformers(family: str, place: str, matrix: str,
                                                                tmp_path: Path) -> None:
    """HY-V3's get the bias from the block around them; LongCat's and Hunyuan's multiply with the weight of a linear
    layer. The copy that is trained holds float32 numbers, which it rounds if transformers does."""
    from transformers import AutoModelForCausalLM

    path = make(tmp_path / "m", family)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).get_submodule(f"model.{place}")
    rows, width = theirs.get_parameter(matrix).shape
    hidden, bias = hidden_states(width), torch.linspace(-0.1, 0.1, rows)
    given = (bias,) if family == "hy_v3" else ()
    for training in (False, True):
        model = plan_model(path, "causal_lm", Optimizer(lr=1e-3) if training else None, dtype="bfloat16")
        shard: Any = shard_of(model, layout_of(), 0, training)[0]
        ours = shard.stage.chunks[0].body.get_submodule(place)
        stored = next(p for n, p in shard.stage.parameters.items() if n.endswith(f"{place}.{matrix}"))
        always = theirs.get_parameter(matrix).dtype == torch.float32
        assert always == (family in ("hunyuan_v1_moe", "beam"))
        assert stored.dtype == (torch.float32 if training or always else torch.bfloat16)
        with torch.no_grad():
            stored.data += 0.001 * (training or always) * stored.data.abs().mean()  # which rounding loses, or not
            theirs.get_parameter(matrix).copy_(stored)
        right = theirs(hidden, *given)
        with shard._numerics(), torch.no_grad():
            found = ours(hidden.float(), *given)
        for a, b in zip(right, found, strict=True):  # tokens of experts are equal, products but for rounding in float32
            torch.testing.assert_close(a, b, rtol=1e-6 * a.is_floating_point(), atol=1e-6 * a.is_floating_point())
        assert found[0].dtype == torch.float32


def test_a_model_in_float32_is_left_alone(path: str) -> None:
    assert router_of(path, "float32")[0].stage.float32_products == frozenset()


class Product(nn.Module):
    def __init__(self, wide: bool = True, more: bool = False) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4, 8))
        self.wide, self.more = wide, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.more:
            raise ValueError("needs more")
        out = nn.functional.linear(x.float(), self.weight.float())
        return out if self.wide else out + nn.functional.linear(x, self.other)


class Within(nn.Module):
    """Multiplies with the weight of the linear layer that it has, or lets it do so."""

    def __init__(self, itself: bool) -> None:
        super().__init__()
        self.inner, self.itself = nn.Linear(8, 4, bias=False), itself

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        own = nn.functional.linear(x.float(), self.inner.weight.float()) if self.itself else self.inner(x)
        return own + bias


def test_a_module_is_tried_without_numbers() -> None:
    assert multiplies_in_float32(Product())
    assert multiplies_in_float32(Within(True)) and not multiplies_in_float32(Within(False))
    assert not multiplies_in_float32(nn.Linear(8, 4)) and not multiplies_in_float32(nn.Sequential(nn.Linear(8, 4)))
    assert not multiplies_in_float32(Product(wide=False)) and not multiplies_in_float32(Product(more=True))


def test_a_copy_in_half_precision_computes_what_its_home_does(path: str) -> None:
    model = plan_model(path, "causal_lm", Optimizer(lr=1e-3), dtype="bfloat16")
    home = shard_of(model, layout_of(), 0, True)[0]
    copy = shard_of(replace(model, train_layout="", optimizer=None), layout_of(), 0, False)[0]
    for name, tensor in home.state_dict().items():
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        copy.state_dict()[name].copy_(tensor.mul_(1 + 0.05 * drawn))
    mine, theirs = (s.infer([pack(ROWS)], "logprobs", 1.0) for s in (home, copy))
    assert torch.equal(mine, theirs)
    gate = f"model.{ROUTER}.weight"
    assert home.stage.rounds_grad("model.layers.1.self_attn.o_proj.weight") and not home.stage.rounds_grad(gate)
