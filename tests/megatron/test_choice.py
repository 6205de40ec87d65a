"""Which backend computes a call, as a program says it: what the compiler and the verifier make of that, and what they
refuse."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.backends.megatron.describe import DESCRIPTION
from rldsl.diag import Diagnostic, Failure
from rldsl.inspect.show import show
from rldsl.plan.backends import unfit
from rldsl.plan.codec import decode
from rldsl.plan.projection import event_paths
from rldsl.verify import verify
from tests.megatron.programs import grpo
from tests.tiny import make_all, make_model

MESH = "on mesh(0:4)"
ALL = {"actor_*": f"{MESH} dp=4", "ref_*": f"{MESH} dp=4"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rldsl.placement.backends.lacking", lambda _: "")


def refused(folder: Path, clause: str, family: str = "qwen3", kind: str = "", **options: Any) -> Diagnostic:
    made = make_model(folder / "m", family, **options)
    (folder / "p.rlf").write_text(
        f'use std.sft (sft)\ndata rows = jsonl("answers.jsonl", batch=4)\n'
        f'model actor = causal_lm("{made}"{kind}) train adamw(lr=1e-3)\n'
        f"flow run(steps=1) {{\n  b = rows.next()\n  actor.train(b, loss=sft()) {clause}\n}}\n")
    with pytest.raises(Failure) as caught:
        api.compile(str(folder / "p.rlf"), {}, None)
    (d,) = caught.value.diagnostics
    return d


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("clause, kind, words", [
    ("on mesh(0:4) dp=4 zero=2 backend=megatron", "", "it supports `zero` only up to 1"),
    ("on mesh(0:4) dp=4 zero=3 backend=megatron", "", "it supports `zero` only up to 1"),
    ("on mesh(0:2) dp=2 backend=megatron", ", lora(r=4)", "it does not support adapters")])
def test_what_megatron_cannot_do_is_named(clause: str, kind: str, words: str, tmp_path: Path) -> None:
    d = refused(tmp_path, clause, kind=kind)
    assert d.code == "RL0327" and words in d.label and "backend=torch" in d.help and "backend=megatron" in d.span.text


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("family, options, words", [
    ("gemma", dict(head_dim=8), "the family gemma"),
    ("llama", dict(attention_bias=True), "attention_bias"),
    ("llama", dict(mlp_bias=True), "mlp_bias"),
    ("llama", dict(hidden_act="gelu"), "the activation `gelu`"),
    ("llama", dict(intermediate_size=49), "an intermediate size of 49"),
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)), "type `dynamic`"),
    ("mixtral", dict(num_local_experts=4, num_experts_per_tok=1), "a single expert per token"),
    ("qwen3_moe", dict(num_experts=4, moe_intermediate_size=24, num_experts_per_tok=2, mlp_only_layers=[0]),
     "layers that are not all the same"),
    ("qwen3", dict(attention_bias=True), "the parameter model.layers.{}.self_attn.k_proj.bias")])
def test_families_that_it_cannot_express(family: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    d = refused(tmp_path, "on mesh(0:2) tp=2 backend=megatron", family, **options)
    assert d.code == "RL0327" and words in d.label, d.label


def test_without_the_package_the_line_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not there: the compiler looks for it itself."""
    for name in [m for m in sys.modules if m.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    d = refused(tmp_path, "on mesh(0:2) tp=2 backend=megatron")
    assert d.code == "RL0326" and "`pip install 'rldsl[megatron]'`" in d.help and "backend=megatron" in d.span.text


@pytest.mark.parametrize("version, refusal", [
    ("0.16.0", False), ("0.16.9+cu13", False), ("0.15.3", True), ("0.16.0rc1", False), ("0.17.0rc0", True),
    ("0.17", True), ("1.0.2", True)])
def test_another_version_is_refused(version: str, refusal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                    ) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "megatron-core" else real(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, real=importlib.util.find_spec: (
        name == "megatron.core" or real(name)))
    assert bool(unfit(DESCRIPTION)) == refusal
    if refusal:
        d = refused(tmp_path, "on mesh(0:2) tp=2 backend=megatron")
        assert d.code == "RL0326" and f"megatron-core {version} is installed, but version 0.16 or later" in d.label
        assert "`pip install 'rldsl[megatron]'`" in d.help and "backend=megatron" in d.span.text


def test_a_version_that_nothing_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not unfit(replace(DESCRIPTION, versions=("no-such-distribution", "1.0", "2.0")))
    assert not unfit(replace(DESCRIPTION, versions=None))


def test_what_it_can_never_do_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert refused(tmp_path, "on mesh(0:4) dp=4 zero=2 backend=megatron").code == "RL0327"


@pytest.mark.parametrize("name, near", [("megatrom", "backend=megatron"), ("os", "backends: "), ("..os", "backends: ")])
def test_a_backend_that_there_is_not(name: str, near: str, tmp_path: Path) -> None:
    d = refused(tmp_path, f'on mesh(0:2) tp=2 backend="{name}"')
    assert d.code == "RL0312" and near in d.help


def test_a_computation_has_no_backend(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure) as caught:
        grpo(tiny, tmp_path, **{"@adv": "on mesh(0:2) backend=megatron"})
    assert caught.value.diagnostics[0].code == "RL0311"


@pytest.mark.parametrize("change, code", [
    (dict(backend="elsewhere"), "RL0612"), (dict(backend="os.path"), "RL0612"),
    (dict(backend="megatron", zero=3), "RL0537")])
def test_the_verifier_knows_backends_by_what_they_describe(change: dict[str, Any], code: str, tiny: Path,
                                                           tmp_path: Path) -> None:
    plan = decode(grpo(tiny, tmp_path, **ALL), "p")
    home = next(m.train_layout for m in plan.models if m.train_layout)
    layouts = tuple(replace(x, **change) if x.id == home else x for x in plan.layouts)
    with pytest.raises(Failure) as caught:
        verify(replace(plan, layouts=layouts))
    assert code in {d.code for d in caught.value.diagnostics}


# --------------------------------------------------------------------------------------------------- what is chosen


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("more, wanted", [
    ({}, {"megatron"}), ({"actor_generate": "mbs=4"}, {"megatron"}),
    ({"actor_generate": "backend=torch"}, {"megatron", "torch"})])
def test_calls_without_a_place_of_their_own_follow(more: dict[str, str], wanted: set[str], tiny: Path,
                                                   tmp_path: Path) -> None:
    """As in degrees, unless they say otherwise."""
    calls = {"actor_train": f"{MESH} dp=2 tp=2 backend=megatron", **more, "ref_*": f"{MESH} dp=4"}
    plan = decode(grpo(tiny, tmp_path, **calls), "p")
    assert {x.backend for x in plan.layouts for e, _ in event_paths(plan)
            if getattr(e, "model", "") == "actor" and getattr(e, "layout", "") == x.id} == wanted


def test_plans_and_texts_name_another_backend_than_the_usual(tiny: Path, tmp_path: Path, installed: None) -> None:
    usual = grpo(tiny, tmp_path, **ALL)
    assert b"backend" not in usual and all(x.backend == "torch" for x in decode(usual, "p").layouts)
    calls = {"actor_train": f"{MESH} tp=2 pp=2 backend=megatron", "actor_generate": f"{MESH} dp=4",
             "ref_*": f"{MESH} dp=4"}
    text = show(decode(grpo(tiny, tmp_path, **calls), "p"))
    assert "tp=2 pp=2 backend=megatron" in text and "backend=torch" not in text
