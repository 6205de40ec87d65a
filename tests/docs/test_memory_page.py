"""The page on memory shows what the compiler says, numbers apart: of a Qwen3 of eight billion parameters, of which
there is no weight here, and none is read."""

from __future__ import annotations

import json
import re
from contextlib import chdir
from pathlib import Path

import pytest

import rldsl
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/howto/memory.md").read_text()
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
          "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
          "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "dtype": "bfloat16"}
LAYER = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
         *(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")))
PROGRAM = re.search(r"^```rlf\n(use.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
TOLD = re.search(r"<!-- output: rlc compile -->\n```text\n(.*?)\n```", PAGE, re.DOTALL)[1]


def numberless(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path):
    model = tmp_path / "models/qwen3-8b"
    model.mkdir(parents=True)
    names = ["model.embed_tokens", "model.norm", "lm_head",
             *(f"model.layers.{i}.{n}" for i in range(CONFIG["num_hidden_layers"]) for n in LAYER)]
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text('{"model": {}}')
    (model / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {f"{name}.weight": "model-00001-of-00001.safetensors" for name in names}}))
    (tmp_path / "big.rlf").write_text(PROGRAM)
    with chdir(tmp_path):
        yield


def test_what_is_told_and_that_the_mend_fits() -> None:
    with pytest.raises(rldsl.DiagnosticError) as error:
        rldsl.compile("big.rlf")
    assert numberless(str(error.value)) == numberless(TOLD)
    rule = re.search(r'--on "([^"]+)"', error.value.diagnostics[0].help)[1]
    assert rldsl.compile("big.rlf", on=rule).memory.bytes < 80e9
