"""Estimates against what runs really hold, for latent attention, routers that multiply in float32, and layers of several
kinds, at shapes that nothing was fitted to; and which of these a family has."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rldsl.memory.activations import stack_activations
from rldsl.memory.attention import Latent, attention_kind, latent_attention, value_width
from rldsl.memory.parameters import Copy, linear_elements
from rldsl.memory.zero_memory import groups_of
from rldsl.models.families import describe, sizes_of
from rldsl.plan.model import Model, Optimizer
from rldsl.sharding.boxes import Cell
from tests.backend_torch.shards import layout_of, plan_model
from tests.families.tiny_configs import make
from tests.memory.estimates import compare_with_run
from tests.memory.plans import Case, on
from tests.samples import thorough_between, thorough_unless
from tests.tiny import make_model

HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
LATENT: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=8, q_lora_rank=96, kv_lora_rank=64,
                              qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, qk_head_dim=48)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=128, n_routed_experts=8, num_experts=8, num_local_experts=8)
SIZES = {"deepseek_v3": LATENT | EXPERTS, "glm4_moe_lite": LATENT | EXPERTS, "minicpm3": LATENT,
         "glm4_moe": HEADS | EXPERTS, "qwen3_moe": HEADS | EXPERTS}
FEW, MANY = Case("few rows", batch=4, prompt=40, response=14), Case("many rows", batch=12, prompt=70, response=9)
HALF = replace(MANY, name="half", dtype="bfloat16")
CASES = (*((family, case) for family in SIZES for case in (MANY, HALF)),
         ("deepseek_v3", replace(FEW, name="few rows, half", dtype="bfloat16")),
         ("glm4_moe", replace(HALF, name="ep=2, half", world=2, place=on(2, "dp=2 ep=2", "dp=2", "dp=2"))),
         ("deepseek_v3", replace(HALF, name="zero=2, half", world=2, place=on(2, "dp=2 zero=2"), batch=24)))
SHOWN = {("deepseek_v3", "half")}


@pytest.mark.parametrize("family, case", thorough_unless(lambda family, case: (family, case.name) in SHOWN, CASES),
                         ids=[f"{f}, {c.name}" for f, c in CASES])
def test_estimates_are_within_the_gate(family: str, case: Case, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model_of(family, tmp_path, hidden_size=256 if case.batch < 10 else 192, intermediate_size=512, vocab_size=2048,
             max_position_embeddings=512)
    compare_with_run(tmp_path, case)


def model_of(family: str, folder: Path, dtype: str = "float32", trained: bool = False, **more: Any) -> Model:
    """A model of two layers in `folder`/m, of which the second has experts, if any has."""
    path = make(folder / "m", family, **dict(hidden_size=64, num_hidden_layers=2) | SIZES.get(family, {}) | more)
    made = plan_model(path, "causal_lm", Optimizer(lr=1e-3) if trained else None, dtype=dtype)
    return replace(made, sizes=sizes_of(describe(path, "causal_lm")))


@pytest.mark.parametrize("family, right", thorough_between([
    ("deepseek_v3", Latent(96, 64, 16, 32, 1)), ("minicpm3", Latent(96, 64, 16, 32, 1)),
    ("longcat_flash", Latent(16, 16, 8, 8, 2)), ("glm4_moe", None), ("llama", None), ("falcon_h1", None)]))
def test_latent_attention_is_known_by_its_matrices(family: str, right: Latent | None, tmp_path: Path) -> None:
    """LongCat's layers have it twice."""
    model = model_of(family, tmp_path)
    assert latent_attention(model) == right
    assert value_width(model) == (right.values if right else model.sizes.head_dim)


@pytest.mark.parametrize("device, dtype, padded, kind", [
    ("cpu", "float32", False, "packed"), ("cpu", "float32", True, "math"), ("cpu", "bfloat16", False, "math"),
    ("cuda", "bfloat16", False, "grid"), ("cuda", "float32", False, "grid")])
def test_values_narrower_than_keys_have_other_kernels(device: str, dtype: str, padded: bool, kind: str,
                                                      tmp_path: Path) -> None:
    compute = 4 if dtype == "float32" else 2
    assert attention_kind(model_of("deepseek_v3", tmp_path / "a", dtype), compute, device, padded) == kind
    assert attention_kind(model_of("deepseek_v3", tmp_path / "b", dtype, qk_rope_head_dim=8, qk_nope_head_dim=24,
                                   qk_head_dim=32), compute, device, padded) != "math"


@pytest.mark.parametrize("family, wide", [("deepseek_v3", True), ("glm4_moe", True), ("hunyuan_v1_moe", True),
                                          ("longcat_flash", True), ("qwen3_moe", False), ("llama", False)])
def test_matrices_that_are_multiplied_in_float32(family: str, wide: bool, tmp_path: Path) -> None:
    found = [s.name for s in model_of(family, tmp_path).params if s.float32_product]
    assert bool(found) == wide and all(name.endswith(("gate.weight", "wg.weight", "classifier.weight")) for name in found)


def test_they_are_not_cast(tmp_path: Path) -> None:
    """No copy in half precision is kept of them, `zero` gathers them in float32, and each pass makes a rounded copy,
    with an input in float32."""
    model = model_of("deepseek_v3", tmp_path, "bfloat16", trained=True)
    other = replace(model, name="other", params=tuple(replace(s, float32_product=False) for s in model.params))
    router = next(s for s in model.params if s.float32_product)
    elements = router.shape[0] * router.shape[1]

    def copy(of: Model, **degrees: int) -> Copy:
        return Copy(of, layout_of(**degrees), Cell(0, 0))

    assert linear_elements(copy(other)) - linear_elements(copy(model)) == elements
    mine, theirs = (groups_of(copy(m, dp=2, zero=2)).parts for m in (model, other))
    assert mine == (theirs[0], theirs[1] + 2 * elements)
    one, two = (stack_activations(m, layout_of(), 2, 4, "cpu", 50).layers[1] for m in (model, other))
    assert one.fixed == 4 * elements and two.fixed == 0
    assert one.saved - two.saved == 4 * model.sizes.hidden - 2 * model.sizes.hidden
    whole = stack_activations(model, layout_of(), 4, 4, "cpu", 50).layers[1]
    assert whole.fixed == 0  # in float32 nothing is rounded


def test_each_layer_is_gathered_as_it_is(tmp_path: Path) -> None:
    """Under `zero` a dense layer and one with experts, not each of both."""
    model = model_of("deepseek_v3", tmp_path, trained=True)
    sizes = {n: 4 * sum(prod(s.shape) for s in model.params if (s.layer in (-1, n) if n >= 0 else True) and
                        (s.stage == "layer") == (n >= 0)) for n in (-1, 0, 1)}
    for level in (1, 3):
        found = groups_of(Copy(model, layout_of(dp=2, zero=level), Cell(0, 0)))
        assert found.parts == found.gradients == (sizes[0], sizes[1]) and found.outside == sizes[-1]
    assert sizes[0] != sizes[1]


def test_layers_are_counted_as_they_are(tmp_path: Path) -> None:
    """The first layer of a DeepSeek-V3 has no experts; a token goes through shared ones besides its own."""
    dense, mixed = stack_activations(model_of("deepseek_v3", tmp_path), layout_of(), 4, 4, "cpu", 50).layers
    assert dense.saved < mixed.saved and dense.backward == mixed.backward  # that of attention is larger
    (alike,) = stack_activations(model_of("qwen3_moe", tmp_path / "q"), layout_of(), 4, 4, "cpu", 50).layers
    assert alike.saved > 0


def test_a_dense_model_has_one_kind_of_layer(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    model = plan_model(str(tmp_path / "m"))
    assert len(stack_activations(model, layout_of(), 4, 4, "cpu", 50).layers) == 1
