"""What is read from HuggingFace directories, and the directories that are refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.models.families import describe
from rldsl.models.skeleton import first_line
from rldsl.plan.model import ParamSpec, Split
from tests.samples import thorough_between
from tests.tiny import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_model(root / "qwen3")
    make_model(root / "tied", tie_word_embeddings=True)
    make_model(root / "gpt2", "gpt2")
    make_model(root / "judge", head="reward_model")
    make_model(root / "moe", "mixtral", num_local_experts=2)
    make_model(root / "other", characters="0123456789+=")
    return root


def specs(path: Path, kind: str = "causal_lm") -> dict[str, ParamSpec]:
    return {s.name: s for s in describe(str(path), kind).params}


def refused(path: Path, kind: str = "causal_lm") -> Diagnostic:
    with pytest.raises(Failure) as caught:
        describe(str(path), kind)
    (d,) = caught.value.diagnostics
    assert str(path) in d.title and d.help
    return d


def test_names_and_shapes_are_those_of_the_model(models: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("qwen3", "tied", "gpt2"):
        real = {n: tuple(p.shape) for n, p in AutoModelForCausalLM.from_pretrained(models / name).named_parameters()}
        found = {}
        for s in describe(str(models / name), "causal_lm").params:
            for n in [s.name.replace("{}", str(i)) for i in range(s.layers)] if "{}" in s.name else [s.name]:
                found[n] = s.shape
        assert found == real


def test_how_a_model_is_divided(models: Path) -> None:
    found = specs(models / "qwen3")
    layer = "model.layers.{}."
    assert found[layer + "self_attn.q_proj.weight"].split == Split(0, ((4, 8),))
    assert found[layer + "self_attn.k_proj.weight"].split == Split(0, ((2, 8),))
    assert found[layer + "self_attn.o_proj.weight"].split == Split(1, ((4, 8),))
    assert found[layer + "mlp.down_proj.weight"].split == Split(1, ((48, 1),))
    assert found[layer + "self_attn.q_norm.weight"].partial_grad
    assert not found[layer + "input_layernorm.weight"].partial_grad
    assert (found["lm_head.weight"].style, found["lm_head.weight"].stage) == ("head", "last")
    assert (found["model.embed_tokens.weight"].style, found["model.embed_tokens.weight"].stage) == ("vocab", "first")
    assert found["model.norm.weight"].stage == "last"


def test_tied_embeddings(models: Path) -> None:
    assert "lm_head.weight" not in specs(models / "tied")
    assert specs(models / "tied")["model.embed_tokens.weight"].stage == "ends"
    assert specs(models / "tied", "value_model")["model.embed_tokens.weight"].stage == "first"


def test_heads(models: Path) -> None:
    for path, kind in ((models / "qwen3", "value_model"), (models / "judge", "reward_model")):
        found = specs(path, kind)
        assert found["score.weight"] == ParamSpec("score.weight", (1, 32), "last") and "lm_head.weight" not in found


def test_families_without_a_known_plan(models: Path) -> None:
    gpt2 = describe(str(models / "gpt2"), "causal_lm")
    assert "no tensor-parallel plan" in gpt2.tp_problem and gpt2.pp_problem == ""
    assert all(s.split is None for s in gpt2.params)
    stages = {s.name.removeprefix("transformer."): s.stage for s in gpt2.params if "{}" not in s.name}
    assert stages == {"wte.weight": "ends", "wpe.weight": "first", "ln_f.weight": "last", "ln_f.bias": "last"}


def test_experts(models: Path) -> None:
    """Whole rows of what gate and up projections give, whole columns of what down projections read."""
    moe, found = describe(str(models / "moe"), "causal_lm"), specs(models / "moe")
    assert (moe.experts, moe.chosen, moe.expert_width, moe.tp_problem) == (2, 2, 48, "")
    layer = "model.layers.{}.mlp."
    assert found[layer + "experts.gate_up_proj"].split == Split(1, ((48, 1), (48, 1)))
    assert found[layer + "experts.down_proj"].split == Split(2, ((48, 1),))
    assert [found[layer + n].experts for n in ("experts.gate_up_proj", "experts.down_proj", "gate.weight")] == [2, 2, 0]
    assert found[layer + "experts.gate_up_proj"].stored == tuple(
        "model.layers.{}.block_sparse_moe.experts.{expert}." + n for n in ("w1.weight", "w3.weight"))
    assert found[layer + "gate.weight"].stored == ("model.layers.{}.block_sparse_moe.gate.weight",)


def test_tokenizers_are_compared_by_what_they_do(models: Path) -> None:
    same = {describe(str(models / n), "causal_lm").tokenizer for n in ("qwen3", "tied", "gpt2")}
    assert len(same) == 1 and describe(str(models / "other"), "causal_lm").tokenizer not in same


def test_missing_directory(tmp_path: Path) -> None:
    assert refused(tmp_path / "none").code == "RL0301"
    (tmp_path / "empty").mkdir()
    d = refused(tmp_path / "empty")
    assert d.code == "RL0301" and "config.json" in d.label


@pytest.mark.parametrize("gone, word", [("tokenizer*", "tokenizer"), ("*.safetensors", "weights")])
def test_incomplete_directory(tmp_path: Path, gone: str, word: str) -> None:
    path = make_model(tmp_path / "m")
    for file in path.glob(gone):
        file.unlink()
    d = refused(path)
    assert d.code == "RL0302" and word in d.title


def test_reward_model_without_a_head(models: Path) -> None:
    d = refused(models / "qwen3", "reward_model")
    assert d.code == "RL0302" and "score" in d.title


def test_damaged_weights(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    (path / "model.safetensors").write_bytes(b"\x05")
    assert refused(path).code == "RL0302"


def test_weights_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not called corrupted: the user would copy them again."""
    path, real = make_model(tmp_path / "m"), Path.open

    def refuse(file: Path, *args: str, **more: str) -> object:
        if file.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file, *args, **more)

    monkeypatch.setattr(Path, "open", refuse)
    d = refused(path)
    assert (d.code, d.label) == ("RL0302", "model.safetensors: Permission denied") and "permissions" in d.help
    assert "corrupted" not in d.help


def test_index_of_shards(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m", head="reward_model")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "x"}}))
    assert refused(path, "reward_model").code == "RL0302"


@pytest.mark.parametrize("text", thorough_between(["{", "{}", '{"model_type": "nothing-of-the-kind"}', '{"model_type": "vit"}',
                                  '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}']))
def test_unusable_config(tmp_path: Path, text: str) -> None:
    path = make_model(tmp_path / "m")
    (path / "evil.py").write_text("raise SystemExit('remote code ran')")
    (path / "config.json").write_text(text)
    assert refused(path).code == "RL0303"


@pytest.mark.parametrize(("text", "shown"), [
    ("short\nsecond line", "short"), ("", "ValueError"), ("word " * 40, "word " * 32 + "..."),
    ("x" * 500, "x" * 160 + " ...")])
def test_a_long_reason_of_transformers_is_cut_between_words(text: str, shown: str) -> None:
    assert first_line(ValueError(text)) == shown
