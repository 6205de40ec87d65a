"""Models whose rotary position embeddings would rotate an odd number of dimensions are refused when they are described,
and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rldsl.diag import Diagnostic, Failure
from rldsl.models import known, rotary
from rldsl.models.families import describe
from rldsl.models.skeleton import build, first_line
from tests.samples import thorough_between
from tests.tiny import make_model

# heads of a width of 7
SIZES = dict(vocab_size=46, hidden_size=28, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPTJ = dict(vocab_size=46, n_embd=28, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=2)


def refused(family: str, sizes: dict[str, Any]) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        build(AutoConfig.for_model(family, **sizes), "odd", None)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0303" and '"odd"' in found.title and "even" in found.help
    return found


@pytest.mark.parametrize("family, more, width", thorough_between([
    ("qwen2", {}, 7), ("mixtral", {}, 7), ("olmo2", {}, 7), ("phi3", {}, 7), ("starcoder2", {}, 7), ("granite", {}, 7),
    ("llama", dict(head_dim=3), 3), ("phi", {}, 3), ("phi", dict(hidden_size=56), 7)]))
def test_an_odd_width_is_refused(family: str, more: dict[str, Any], width: int) -> None:
    """Also where only a part of the head is rotated, and that part is odd."""
    assert refused(family, SIZES | more).label.endswith(f"would rotate {width}")


def test_an_odd_part_of_the_head_is_refused() -> None:
    assert refused("gptj", GPTJ | dict(n_embd=32, rotary_dim=7)).label.endswith("would rotate 7")


@pytest.mark.parametrize("family, sizes", thorough_between([
    ("gpt_neox", SIZES), ("gpt2", GPTJ), ("gemma", SIZES | dict(head_dim=8)), ("qwen3", SIZES | dict(head_dim=8)),
    ("stablelm", SIZES), ("gptj", GPTJ | dict(rotary_dim=6)), ("qwen2", SIZES | dict(hidden_size=32)),
    ("mixtral", SIZES | dict(hidden_size=32))]))
def test_what_runs_is_not_refused(family: str, sizes: dict[str, Any]) -> None:
    """Widths that nothing rotates may be odd, and so may a head of which an even part is rotated."""
    config = AutoConfig.for_model(family, **sizes)
    assert build(config, "m", None).params
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config)(torch.tensor([[1, 2, 3]], device="cpu"))


def test_what_is_known_of_families_does_not_pass_over_it() -> None:
    odd, even = (AutoConfig.for_model("qwen2", **SIZES | dict(hidden_size=width)) for width in (28, 32))
    assert known.skeleton(odd) is None
    if known.installed("qwen2") in known.SOURCES["qwen2"]:
        assert known.skeleton(even) is not None


def test_a_model_that_fails_for_another_reason_is_left_to_run() -> None:
    class Other(torch.nn.Module):
        def forward(self, *_: object, **__: object) -> None:
            raise NotImplementedError("not without storage")

    config = AutoConfig.for_model("qwen2", **SIZES)
    assert rotary.rotates_odd_width(Other(), config) == ""


def test_an_even_width_is_not_tried() -> None:
    config = AutoConfig.for_model("qwen2", **SIZES | dict(hidden_size=32))
    assert rotary.rotates_odd_width(None, config) == ""


@pytest.mark.parametrize("config, odd", [
    (dict(head_dim=7), True), (dict(head_dim=8), False), (dict(hidden_size=28, num_attention_heads=4), True),
    (dict(hidden_size=28, num_attention_heads=0), False), (dict(hidden_size="28", num_attention_heads=4), False),
    (dict(head_dim=14, rope_parameters={"partial_rotary_factor": 0.5}), True),
    (dict(head_dim=14, rope_parameters={"full": {"partial_rotary_factor": 0.5}, "none": None}), True),
    (dict(head_dim=16, rope_parameters={"partial_rotary_factor": 0.5}), False), (dict(head_dim=None), False),
    ({}, False)])
def test_widths_of_a_config(config: dict[str, Any], odd: bool) -> None:
    assert rotary.has_odd_head(config) == odd


@pytest.mark.parametrize("change, says", [
    (dict(head_dim=7), rotary.HELP), (dict(num_hidden_layers="two"), "correct config.json where transformers says"),
    (dict(model_type="none_such"), "config.json must have a model_type")])
def test_advice_on_configs_that_transformers_refuses(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = make_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(Failure) as caught:
        describe(str(path), "causal_lm")
    (found,) = caught.value.diagnostics
    assert found.code == "RL0303" and found.help.startswith(says) and not found.label.endswith(":"), found


@pytest.mark.parametrize("text, shown", [("Validation failed for x:\n    ValueError: no\n", "ValueError: no"),
                                         ("alone:", "alone:"), ("\n\nfirst\nsecond:", "first")])
def test_a_line_that_announces_the_reason_is_not_the_reason(text: str, shown: str) -> None:
    assert first_line(ValueError(text)) == shown
