"""MLPs whose gated product is computed by a kernel keep no silu(gate), and the estimate counts as many bytes less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rldsl.backends.torch.model.fused_layers import fuse_layers
from rldsl.memory.activations import gates_are_fused, stack_activations
from rldsl.models.families import describe, sizes_of
from rldsl.models.vision import auto_class
from rldsl.models.trials import is_gated_product
from tests.backend_torch.shards import layout_of, plan_model
from tests.families.tiny_configs import make
from tests.samples import thorough_between
from tests.tiny import make_model


class Mlp(nn.Module):
    def __init__(self, act: Any = nn.SiLU, factor: float = 1.0, extra: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn, self.factor = act(), factor
        if extra:
            self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x) * self.factor) * self.up_proj(x))


def _meta(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return Mlp(**options)


def test_a_gated_product_is_found_by_trying_it() -> None:
    assert is_gated_product(_meta())


@pytest.mark.parametrize("options", [dict(act=nn.GELU), dict(act=nn.Identity), dict(factor=0.5), dict(extra=True)])
def test_others_are_left_alone(options: dict[str, Any]) -> None:
    assert not is_gated_product(_meta(**options))


def test_a_module_that_raises_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("needs more")

    monkeypatch.setattr(Mlp, "forward", broken)
    assert not is_gated_product(_meta())


@pytest.mark.parametrize("family", thorough_between(["llama", "gemma3_text", "deepseek_v3", "glm4", "falcon_h1", "mixtral"]))
def test_a_description_knows_what_the_backend_replaces(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    path = make(tmp_path / "m", family)
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    fused = [n for n in fuse_layers(model, torch.device("cpu")) if not n.endswith(("attn", "attention", "rotary_emb"))]
    assert describe(path, "causal_lm").gated_products == bool(fused)


def test_kernels_are_for_float32_on_cpus_and_for_half_precision_on_gpus() -> None:
    assert gates_are_fused(False, 4, "cpu") and gates_are_fused(False, 2, "cuda")
    assert not gates_are_fused(False, 2, "cpu") and not gates_are_fused(False, 4, "cuda")
    assert not gates_are_fused(True, 4, "cpu") and not gates_are_fused(True, 2, "cuda")


def test_a_layer_keeps_one_row_of_its_mlp_less(tmp_path: Path) -> None:
    """In float32 on CPUs; not where the modules are of another form, nor of an invariant model."""
    path = str(make_model(tmp_path / "m", intermediate_size=96))
    model = replace(plan_model(path), sizes=sizes_of(describe(path, "causal_lm")))
    other = replace(model, sizes=replace(model.sizes, gated_products=False))

    def saved(which: Any, item: int, device: str) -> int:
        return stack_activations(which, layout_of(), item, 4, device, 32).any.saved

    assert model.sizes.gated_products
    assert saved(other, 4, "cpu") - saved(model, 4, "cpu") == 4 * 96
    assert saved(other, 2, "cuda") - saved(model, 2, "cuda") == 2 * 96
    assert saved(other, 2, "cpu") == saved(model, 2, "cpu") and saved(other, 4, "cuda") == saved(model, 4, "cuda")
    assert saved(replace(model, invariant=True), 4, "cpu") == saved(replace(other, invariant=True), 4, "cpu")
