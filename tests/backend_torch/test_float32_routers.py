"""Routers that multiply in float32 in transformers' models of half precision do so here, under autocast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rldsl.backends.torch.model import stage
from rldsl.backends.torch.model.autocast import keep_float32_products, multiplies_in_float32
from rldsl.backends.torch.model.skeleton import empty_model
from rldsl.plan.model import Optimizer
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
    bias = router.e_score_correction_bias
    assert bias.dtype == torch.float32
    bias.copy_(bias.bfloat16().float())  # which is what a copy in half precision holds
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
    ("deepseek_v3", True), ("glm4_moe", True), ("dots1", True), ("qwen3_moe", False), ("mixtral", False),
    ("qwen3_next", False), ("minimax_m2", False), ("llama", False)])
def test_which_modules_multiply_in_float32(family: str, wide: bool, tmp_path: Path) -> None:
    """As transformers' code of each family says: those of Qwen and Mixtral multiply in half precision there, too."""
    from transformers import AutoConfig

    model, _ = empty_model(AutoConfig.from_pretrained(make(tmp_path / "m", family)))
    names = keep_float32_products(model, CPU)
    assert bool(names) == wide and all(name.endswith("gate") for name in names)


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


def test_a_module_is_tried_without_numbers() -> None:
    assert multiplies_in_float32(Product())
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
