"""Skeletons that are known without building modules are those of the modules, or there are none."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rldsl.diag import Failure
from rldsl.models import families, known
from rldsl.models.families import describe
from rldsl.models.skeleton import build
from tests.tiny import make_model

SIZES = dict(vocab_size=46, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
SWITCHES: dict[str, dict[str, list[Any]]] = {
    "llama": {"attention_bias": [False, True], "mlp_bias": [False, True], "head_dim": [None, 10],
              "rope_parameters": [None, LLAMA3]},
    "mistral": {"head_dim": [None, 10], "sliding_window": [None, 16]},
    "qwen2": {"use_sliding_window": [False, True], "max_window_layers": [1, 9]},
    "qwen3": {"attention_bias": [False, True], "head_dim": [10], "use_sliding_window": [False, True],
              "max_window_layers": [1]},
}
EVERY: dict[str, list[Any]] = {"tie_word_embeddings": [False, True], "num_key_value_heads": [1, 4],
                               "hidden_act": ["silu", "gelu"], "dtype": [None, "bfloat16"]}
# as they are on the Hub, written by earlier versions of transformers
HUB: dict[str, dict[str, Any]] = {
    "qwen2.5": dict(architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
                    hidden_act="silu", hidden_size=64, initializer_range=0.02, intermediate_size=96,
                    max_position_embeddings=32768, max_window_layers=21, model_type="qwen2", num_attention_heads=4,
                    num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=1000000.0,
                    sliding_window=32768, tie_word_embeddings=True, torch_dtype="bfloat16",
                    transformers_version="4.43.1", use_cache=True, use_sliding_window=False, vocab_size=151),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=1,
                  eos_token_id=2, head_dim=128, hidden_act="silu", hidden_size=64, initializer_range=0.02,
                  intermediate_size=96, max_position_embeddings=40960, max_window_layers=28, model_type="qwen3",
                  num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-06,
                  rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True,
                  torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True, use_sliding_window=False,
                  vocab_size=151),
    "llama3.2": dict(architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=1,
                     eos_token_id=2, head_dim=16, hidden_act="silu", hidden_size=64, initializer_range=0.02,
                     intermediate_size=96, max_position_embeddings=131072, mlp_bias=False, model_type="llama",
                     num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, pretraining_tp=1,
                     rms_norm_eps=1e-05,
                     rope_scaling=dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0,
                                       original_max_position_embeddings=8192, rope_type="llama3"),
                     rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16",
                     transformers_version="4.45.0.dev0", use_cache=True, vocab_size=151),
    "mistral": dict(architectures=["MistralForCausalLM"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
                    head_dim=None, hidden_act="silu", hidden_size=64, initializer_range=0.02, intermediate_size=96,
                    max_position_embeddings=32768, model_type="mistral", num_attention_heads=4, num_hidden_layers=2,
                    num_key_value_heads=2, rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None,
                    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.42.0.dev0",
                    use_cache=True, vocab_size=151),
}


def variants(family: str) -> Iterator[dict[str, Any]]:
    """Each switch of the family with each other, and each of `EVERY` on its own."""
    own = SWITCHES[family]
    for values in itertools.product(*own.values()):
        yield dict(zip(own, values, strict=True))
    for name, choices in EVERY.items():
        for value in choices:
            yield {name: value}


def same(config: Any) -> None:
    found, built = known.skeleton(config), build(config, "m", None)
    assert found is not None
    for field in fields(built):
        assert getattr(found, field.name) == getattr(built, field.name) or field.name == "tp_plan", field.name
    base = {f"model.{k}": v for k, v in (config.base_model_tp_plan or {}).items()}  # the same for both: of the config
    assert dict(found.tp_plan) | base == dict(built.tp_plan) | base


@pytest.mark.parametrize("family", SWITCHES)
def test_they_are_those_of_the_modules(family: str) -> None:
    if known.installed(family) not in known.SOURCES[family]:
        pytest.skip(f"this version of {family} was not compared: its models are described by building them")
    for variant in variants(family):
        same(AutoConfig.for_model(family, **SIZES | variant))


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("kind", ["causal_lm", "value_model"])
def test_descriptions_are_the_same_either_way(name: str, kind: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLDSL_CACHE", "off")
    path = make_model(tmp_path / "m")
    (path / "config.json").write_text(json.dumps(HUB[name]))
    quick = describe(str(path), kind)
    monkeypatch.setattr(known, "skeleton", lambda _config: None)
    assert describe(str(path), kind) == quick


@pytest.mark.parametrize("name", HUB)
def test_models_of_the_hub_are_known(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB[name]))
    config = AutoConfig.from_pretrained(tmp_path)
    if known.installed(config.model_type) in known.SOURCES[config.model_type]:
        same(config)


def test_the_pinned_version_is_known() -> None:
    from importlib.metadata import version

    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().split()
    if f"transformers=={version('transformers')}" not in pins:
        pytest.skip("another version of transformers than that of constraints.txt")
    assert all(known.installed(family) in known.SOURCES[family] for family in known.SOURCES)


@pytest.mark.parametrize("family, odd", [
    ("qwen3", dict(hidden_act="none_of_these")), ("qwen3", dict(pad_token_id=46)), ("qwen3", dict(pad_token_id=-1)),
    ("llama", dict(attention_chunk_size=16)), ("llama", dict(kv_lora_rank=4)),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0))),
    ("llama", dict(rope_parameters=dict(LLAMA3, factor=0.0))), ("mistral", dict(intermediate_size=0)),
    ("qwen2", dict(layer_types=["full_attention"] * 2)), ("qwen2", dict(num_hidden_layers=0)),
    ("llama", dict(auto_map={"AutoConfig": "evil.Config"})), ("llama", dict(quantization_config={"bits": 4})),
    ("llama", dict(attn_implementation="flash_attention_2")), ("gemma", {}), ("gpt2", {}), ("mixtral", {})])
def test_what_is_out_of_the_ordinary_is_built(family: str, odd: dict[str, Any]) -> None:
    """Whatever transformers refuses is left to it, when it reads the config or when it builds the modules."""
    try:
        config = AutoConfig.for_model(family, **(SIZES if family != "gpt2" else {}) | odd)
    except Exception:
        return
    assert known.skeleton(config) is None


@pytest.mark.parametrize("odd", [dict(temperature=0.5), dict(do_sample=True), dict(pruned_heads={}),
                                 dict(task_specific_params={"a": 1}), dict(torch_dtype="float16"), dict(rope_theta=5.0),
                                 dict(output_attentions=True), dict(output_hidden_states=True), dict(num_labels=1),
                                 dict(is_decoder=True), dict(unheard_of=1)])
def test_what_is_known_of_odd_configs_is_right(odd: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB["llama3.2"] | odd))
    config = AutoConfig.from_pretrained(tmp_path)
    assert known.skeleton(config) is None or same(config) is None


def test_other_sources_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    monkeypatch.setattr(known, "installed", lambda family: "0" * 64)
    assert known.skeleton(config) is None
    monkeypatch.setattr(known, "installed", lambda family: "")
    assert known.skeleton(config) is None


def test_a_refusal_is_that_of_the_modules(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_act": "none_of_these"}))
    with pytest.raises(Failure, match="RL0303"):
        families.describe(str(path), "causal_lm")


COMPILE = """
import sys
from click.testing import CliRunner
from rldsl.cli import main
result = CliRunner().invoke(main, ["compile", "p.rlf"])
print(result.exit_code, sorted(m for m in sys.modules))
"""
PROGRAM = """use std.grpo (group_norm, grpo_free)
use py "r.py" (score: gen -> seq)
data prompts = jsonl("d.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm("m") train adamw(lr=1e-3)
flow f(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=4)
  r = score(gen)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(r)))
}
"""
HEAVY = {"torch", "transformers", "numpy", "safetensors", "tokenizers", "sympy", "scipy", "networkx", "yaml"}
NEEDLESS = {"transformers.modeling_utils", "transformers.generation.utils", "torch._dynamo", "torch.distributed.tensor",
            "torch.distributed.fsdp", "sympy", "scipy", "triton", "accelerate"}


@pytest.mark.thorough
def test_what_compiling_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of torch once a model is described; before that, what reads its config and no modules."""
    make_model(tmp_path / "m")
    (tmp_path / "p.rlf").write_text(PROGRAM)
    (tmp_path / "r.py").write_text("def score(rows):\n    return [0.0 for _ in rows]\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1="}\n' * 8)
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path / "cache"))
    config = AutoConfig.from_pretrained(tmp_path / "m")
    for run, refused in enumerate((NEEDLESS, HEAVY)):
        done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=True, cwd=tmp_path)
        code, _, modules = done.stdout.partition(" ")
        assert code == "0" and (tmp_path / "p.plan").is_file(), done.stdout
        if run or known.skeleton(config) is not None:
            assert not refused & set(json.loads(modules.replace("'", '"')))
