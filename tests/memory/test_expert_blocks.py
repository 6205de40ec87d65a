"""Estimates against what runs really hold, for families whose experts have a form of their own and whose attention has
sinks or capped scores, at shapes that nothing was fitted to; and what trials say of such blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl.models import expert_blocks
from rldsl.models.families import describe
from rldsl.models.skeleton import build
from tests.families.tiny_configs import make, tiny_config
from tests.memory.estimates import compare_with_run
from tests.memory.plans import Case, on
from tests.samples import thorough_unless
from tests.tiny import make_model

HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": dict(intermediate_size=256, num_local_experts=8, num_experts_per_tok=2),
    "llama4_text": dict(intermediate_size=192, intermediate_size_mlp=512, num_local_experts=4, num_experts_per_tok=1,
                        interleave_moe_layer_step=2),
    "gemma2": dict(intermediate_size=512)}
FEW, MANY = Case("few rows", batch=4, prompt=40, response=14), Case("many rows", batch=12, prompt=70, response=9)
HALF, ADAPTERS = replace(FEW, name="half", dtype="bfloat16"), replace(MANY, name="adapters", adapters=", lora(r=8)")
CASES = (("gpt_oss", MANY), ("gpt_oss", HALF), ("gpt_oss", ADAPTERS),
         ("gpt_oss", replace(MANY, name="tp=2", world=2, place=on(2, "tp=2", "tp=2", "tp=2"))),
         ("llama4_text", FEW), ("llama4_text", MANY), ("llama4_text", HALF), ("llama4_text", ADAPTERS),
         ("llama4_text", replace(MANY, name="pp=2", world=2, place=on(2, "pp=2 mbs=2", "dp=2", "pp=2"))),
         ("gemma2", MANY))

SHOWN = {("gpt_oss", "many rows"), ("llama4_text", "pp=2")}


@pytest.mark.thorough
@pytest.mark.parametrize("family, case", thorough_unless(lambda family, case: (family, case.name) in SHOWN, CASES), ids=[f"{f}, {c.name}" for f, c in CASES])
def test_estimates_are_within_the_gate(family: str, case: Case, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m", family, **HEADS | SIZES[family] | dict(
        hidden_size=256 if case.batch < 10 else 192, num_hidden_layers=4, vocab_size=2048,
        max_position_embeddings=512))
    compare_with_run(tmp_path, case)


def test_each_kind_of_layer_has_a_trial(tmp_path: Path) -> None:
    """In both sizes of an element, with gradients of the parameters and without. Weights that are rounded to half
    precision are there once more, whatever the tokens; without gradients a product does not keep its input."""
    found = describe(make(tmp_path / "m", "llama4_text", **SIZES["llama4_text"]), "causal_lm").expert_blocks
    assert [(b.layers, b.itemsize, b.trained) for b in found] == [((1, 3), i, t) for i in (4, 2) for t in (True, False)]
    (full, frozen), (half, _) = found[:2], found[2:]
    assert full.saved > frozen.saved > 0 and full.fixed == frozen.fixed == 0 < half.fixed
    assert half.saved < full.saved and full.forward < full.outputs


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_experts_of_the_known_form_have_none(family: str, tmp_path: Path) -> None:
    assert describe(make(tmp_path / "m", family), "causal_lm").expert_blocks == ()


def test_dense_models_have_none(tmp_path: Path) -> None:
    assert describe(str(make_model(tmp_path / "m")), "causal_lm").expert_blocks == ()


def test_a_trial_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(expert_blocks, "_passes", unknown)
    found = build(tiny_config("gpt_oss"), "m", None)
    assert found.expert_blocks == () and found.uncounted == "layers.0.mlp.experts, which has a form of its own"


def test_a_norm_without_a_weight(tmp_path: Path) -> None:
    """DiffLlama's, of the difference of two attentions."""
    assert describe(str(make_model(tmp_path / "m", family="diffllama", num_hidden_layers=2)), "causal_lm").layers == 2
