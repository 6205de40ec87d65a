"""Weights from directories as they occur, whole and damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rldsl.backends.torch import build
from safetensors.torch import load_file, save_file

from rldsl.diag import Failure
from rldsl.plan.model import Layout, Mesh
from rldsl.runtime.backend import Axes, Axis
from tests.backend_torch.shards import make_shard, pack, plan_model
from tests.generation.reference import whole_model
from tests.tiny import make_model


@pytest.fixture
def directory(tmp_path):
    return make_model(tmp_path / "m", num_hidden_layers=2)


def built(model):
    alone = Axis((0,), 0, None)
    return build(model, Layout("L0", "m0"), Mesh("m0", ((0, 1),)), Axes(alone, alone, alone, alone, alone),
                 torch.device("cpu"), load=True, trainable=False)


def rewrite(directory, change):
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def diagnostic(model):
    with pytest.raises(Failure) as raised:
        built(model)
    return raised.value.diagnostics[0]


def test_every_parameter_is_that_of_the_file(directory):
    tensors, stored = built(plan_model(str(directory))).state_dict(), load_file(directory / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)


def test_a_bare_base_model_lacks_the_prefix(directory):
    model = plan_model(str(directory), "value_model")
    stored = load_file(directory / "model.safetensors")
    rewrite(directory, lambda all: {n.removeprefix("model."): t for n, t in all.items() if n != "lm_head.weight"})
    tensors = built(model).state_dict()
    assert torch.equal(tensors["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert not tensors["score.weight"].any()  # a value model without a head starts at zero


def test_several_files_and_an_index(directory):
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    parts = {f"part{i}.safetensors": dict(list(stored.items())[i::2]) for i in range(2)}
    for name, tensors in parts.items():
        save_file(tensors, directory / name)
    index = {"weight_map": {n: name for name, tensors in parts.items() for n in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = built(plan_model(str(directory))).state_dict()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)
    (directory / "part1.safetensors").unlink()
    found = diagnostic(plan_model(str(directory)))
    assert found.code == "RL0721" and found.place.endswith("part1.safetensors")


def test_an_index_that_is_wrong(directory):
    model = plan_model(str(directory))
    index = directory / "model.safetensors.index.json"
    index.write_text("{")
    found = diagnostic(model)
    assert found.code == "RL0721" and found.place == str(index)
    names = load_file(directory / "model.safetensors")
    index.write_text(json.dumps({"weight_map": {n: "model.safetensors" for n in names}}))
    rewrite(directory, lambda all: {n: t for n, t in all.items() if n != "model.norm.weight"})
    found = diagnostic(model)
    assert found.code == "RL0722" and "model.norm.weight" in found.title


def test_a_missing_parameter_is_named(directory):
    model = plan_model(str(directory))
    rewrite(directory, lambda all: {n: t for n, t in all.items() if n != "model.layers.1.mlp.up_proj.weight"})
    found = diagnostic(model)
    assert found.code == "RL0722" and "model.layers.1.mlp.up_proj.weight" in found.title


def test_a_reward_model_needs_its_head(tmp_path):
    directory = make_model(tmp_path / "rm", head="reward_model", num_hidden_layers=2)
    model = plan_model(str(directory), "reward_model")
    rewrite(directory, lambda all: {n: t for n, t in all.items() if n != "score.weight"})
    assert "score.weight" in diagnostic(model).title


def test_another_shape_is_named(directory):
    model = plan_model(str(directory))
    rewrite(directory, lambda all: all | {"model.norm.weight": torch.ones(31)})
    found = diagnostic(model)
    assert found.code == "RL0723" and found.place.endswith("model.safetensors")
    assert "model.norm.weight" in found.title and "31" in found.title and "32" in found.title


def test_no_file_and_a_damaged_file(directory):
    model, file = plan_model(str(directory)), directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert diagnostic(model).code == "RL0721"
    file.unlink()
    assert diagnostic(model).code == "RL0721"


def test_a_directory_that_is_gone(directory):
    found = diagnostic(replace(plan_model(str(directory)), path=str(directory / "elsewhere")))
    assert found.code == "RL0726" and "elsewhere" in found.place


def test_a_config_that_changed_since_compilation(directory):
    model = plan_model(str(directory))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert "changed" in diagnostic(model).title


@pytest.mark.parametrize(("family", "more"), [("granite", {"logits_scaling": 4.0}), ("phi", {})])
def test_scaled_logits_and_those_with_a_bias(family: str, more: dict[str, float], tmp_path: Path) -> None:
    """Granite divides its logits, Phi adds a bias to them; leaving it out would give other log-probs without a word."""
    path = str(make_model(tmp_path / "m", family=family, **more))
    rows = [([3, 4, 5], [6, 7]), ([9], [8, 3, 4])]
    found = make_shard(plan_model(path), 0).infer([pack(rows)], "logprobs", 1.0)
    right = []
    for prompt, response in rows:
        logits = whole_model(path)(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        right += [logits[len(prompt) - 1 + i, token] for i, token in enumerate(response)]
    assert torch.allclose(found, torch.stack(right), atol=1e-5)
