"""Configs with a size that no model can have are refused with the name that config.json gives it, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from rldsl.diag import Failure
from rldsl.models.families import describe
from rldsl.models.sizes import POSITIVE, impossible_size
from tests.tiny import make_model

GPT2 = dict(vocab_size=46, n_embd=32, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=2)


def written(folder: Path, **changed: Any) -> Path:
    make_model(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return folder


@pytest.mark.parametrize("size", [0, -4])
@pytest.mark.parametrize("name", [name for name in POSITIVE if name != "num_hidden_layers"])
def test_a_size_below_one_is_refused_by_its_name(tmp_path: Path, name: str, size: int) -> None:
    with pytest.raises(Failure) as caught:
        describe(str(written(tmp_path / "m", **{name: size})), "causal_lm")
    (found,) = caught.value.diagnostics
    assert found.code == "RL0303" and found.label == f"`{name}` is {size}, and must be 1 or more"
    assert "config.json" in found.help


def test_key_value_heads_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure) as caught:
        describe(str(written(tmp_path / "m", num_key_value_heads=3)), "causal_lm")
    (found,) = caught.value.diagnostics
    assert found.label.endswith("must be a multiple of `num_key_value_heads`, which is 3")


@pytest.mark.parametrize("name, wrong", [
    ("n_embd", dict(n_embd=0)), ("n_head", dict(n_head=0)), ("n_layer", dict(n_layer=-1)),
    ("n_positions", dict(n_positions=0)), ("vocab_size", dict(vocab_size=0))])
def test_the_name_is_the_one_in_the_file(name: str, wrong: dict[str, int]) -> None:
    assert impossible_size(AutoConfig.for_model("gpt2", **GPT2 | wrong)).startswith(f"`{name}` is ")


def test_one_layer_with_a_size_of_zero_is_enough() -> None:
    class Text:
        intermediate_size = [16, 0, 16]

    class Config:
        def get_text_config(self) -> Text:
            return Text()

    assert impossible_size(Config()) == "`intermediate_size` is 0, and must be 1 or more"


def test_configs_as_families_have_them_are_not_refused() -> None:
    """Of all families; XLNet's has as many positions as -1, which here means no limit, but the family is refused."""
    found = {}
    for family in FAMILIES:
        try:
            config = CONFIG_MAPPING[family]()
        except Exception:  # a family without a default
            continue
        if why := impossible_size(config):
            found[family] = why
    assert found.keys() <= {"xlnet"}
