"""Whole programs whose calls run on Megatron: the same losses and samples as on torch; what moves between the two; what
is saved; and what the compiler and the verifier say of backends."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Realloc
from rldsl.plan.model import Plan
from rldsl.plan.movement import carried
from rldsl.plan.project import events
from rldsl.plan.verify import verify
from rldsl.runtime.metrics.names import MEASURED, computed
from tests.checkpoint import runs
from tests.end_to_end.test_invariance import placement
from tests.megatron.shards import needed, on_cpu
from tests.tiny import make_all, make_model
from tests.world import run_world

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
GRPO = HERE.parent / "end_to_end" / "grpo_small.rlf"
Metrics = list[dict[str, float]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)


def compiled(program: Path, sets: dict[str, Any], place: str, folder: Path) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "placement.rlf").write_text(place)
    return encode(api.compile(str(program), sets, str(folder / "placement.rlf")))


def execute(rank: int, plans: list[bytes], out: str, cwd: str) -> None:
    from rldsl.runtime.executor import execute as run
    from rldsl.runtime.options import Options

    on_cpu()
    os.chdir(cwd)
    for i, data in enumerate(plans):
        run(data, "test.plan", f"{out}/{i}", options=Options(allow_write=(out,)))


def metrics(plans: list[bytes], folder: Path, world: int) -> list[Metrics]:
    run_world(world, execute, plans, str(folder / "out"), os.getcwd(), timeout=240.0)
    found = []
    for i in range(len(plans)):
        lines = [json.loads(x) for x in (folder / f"out/{i}/metrics.jsonl").read_text().splitlines()]
        found.append([{k: line[k] for k in computed(line)} for line in lines])
    return found


def alike(found: Metrics, expected: Metrics) -> None:
    assert len(found) == len(expected) == 5
    for step, (mine, theirs) in enumerate(zip(found, expected), 1):
        for name, value in theirs.items():
            if not name.startswith(MEASURED):
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"step {step}: {name}"


def grpo(tiny: Path, folder: Path, **calls: str) -> bytes:
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    return compiled(GRPO, sets, placement(4, **calls), folder)


def test_grpo_is_the_same_on_megatron(tiny: Path, tmp_path: Path) -> None:
    needed()
    mesh = "on mesh(0:4)"
    plans = [
        grpo(tiny, tmp_path, **{"actor_*": f"{mesh} dp=4", "ref_*": f"{mesh} dp=4"}),
        grpo(tiny, tmp_path, actor_train=f"{mesh} tp=2 pp=2 backend=megatron", **{
            "actor_generate": f"{mesh} dp=2 tp=2 backend=megatron", "ref_*": f"{mesh} dp=2 pp=2"})]
    torch, megatron = metrics(plans, tmp_path, 4)
    assert len({step["length"] for step in torch}) > 1 and torch[0]["actor/loss"] != torch[-1]["actor/loss"]
    alike(megatron, torch)


def test_ppo_is_the_same_on_megatron(tiny: Path, tmp_path: Path) -> None:
    needed()
    sets = {"base": str(tiny / "models/sft"), "rm": str(tiny / "models/rm"), "rows": str(tiny / "data/prompts.jsonl"),
            "lr": 1e-3, "steps": 5, "batch": 8, "tokens": 6}
    program = tmp_path / "ppo.rlf"
    program.write_text((EXAMPLES / "ppo.rlf").read_text().replace("cluster nodes=1 gpus=8\n", ""))
    models, mesh = ("actor", "critic", "ref", "judge"), "on mesh(0:4)"
    plain = placement(4, **{f"{m}_*": f"{mesh} dp=4" for m in models})
    mixed = placement(4, actor_generate=f"{mesh} dp=4", actor_train=f"{mesh} dp=2 pp=2 backend=megatron",
                      critic_train="on mesh(0:2) tp=2 backend=megatron", critic_values="on mesh(2:4) dp=2",
                      **{"ref_*": "on mesh(0:2) cp=2 backend=megatron",
                         "judge_*": "on mesh(2:4) pp=2 backend=megatron"})
    torch, megatron = metrics([compiled(program, sets, p, tmp_path) for p in (plain, mixed)], tmp_path, 4)
    alike(megatron, torch)


def lacking(plan: Plan, event: Realloc) -> int:
    """Bytes of boxes that ranks of the destination have not before it, found element by element."""
    import numpy as np

    from rldsl.plan.boxes import holding, itemsize, parameters, slices

    layouts, meshes = {x.id: x for x in plan.layouts}, {m.id: m for m in plan.meshes}
    src, dst = layouts[event.src], layouts[event.dst]
    model = next(m for m in plan.models if m.name == event.model)
    moved, total = carried(model, src.id, model, dst.id, 0.0), 0
    for p in parameters(model):
        for rank in meshes[dst.mesh].members():
            there = np.zeros(p.spec.shape, bool)
            for x, value in ((dst, True), (src, False)):
                for piece in holding(p, model.layers, x, meshes[x.mesh], rank):
                    there[slices(piece.box)] = value
            total += int(there.sum()) * itemsize(moved)
    return total


def test_what_moves_between_backends_is_what_is_lacking(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("rldsl.placement.backends.lacking", lambda _: "")
    mesh = "on mesh(0:4)"
    plans = [decode(grpo(tiny, tmp_path, actor_train=f"{mesh} tp=2 pp=2 {backend}", actor_generate=f"{mesh} dp=4",
                         **{"ref_*": f"{mesh} dp=4"}), "p") for backend in ("", "backend=megatron")]
    found = [[e for e, _ in events(plan) if isinstance(e, Realloc)] for plan in plans]
    assert [len(x) for x in found] == [1, 1] and found[0][0].bytes == found[1][0].bytes > 0
    assert found[1][0].bytes == lacking(plans[1], found[1][0])


def test_a_save_is_the_directory_bit_by_bit(tmp_path: Path) -> None:
    """HuggingFace -> Megatron -> HuggingFace: a step of no length, and the weights are those that were read."""
    needed()
    from safetensors.torch import load_file

    tiny = make_all(tmp_path / "tiny", family="llama", attention_bias=True, mlp_bias=True)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "lr": 0.0, "steps": 1,
            "every_step": 1}
    plan = compiled(GRPO, sets, placement(4, **{"actor_*": "on mesh(0:4) tp=2 pp=2 backend=megatron",
                                                "ref_*": "on mesh(0:4) dp=4"}), tmp_path)
    metrics([plan], tmp_path, 4)
    before = load_file(str(tiny / "models/sft/model.safetensors"))
    (saved,) = {p.parent for p in (tmp_path / "out").rglob("model*.safetensors")}
    after = {k: v for file in saved.glob("*.safetensors") for k, v in load_file(str(file)).items()}
    assert after.keys() == before.keys() and all((after[k] == before[k]).all() for k in before)


def on_one(rank: int, *given: Any) -> str:
    on_cpu()
    return runs._rank(rank, *given)


def test_a_run_goes_on_under_the_other_backend(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, moments, averages and the schedule: three steps on Megatron and three on torch are six on torch."""
    needed()
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    program, models = tmp_path / "small.rlf", ("actor", "slow", "critic")
    text = (HERE.parent / "checkpoint" / "small.rlf").read_text()
    for old, new in (("(rows, batch=4)", "(rows, batch=4, max_prompt_tokens=16)"),
                     ("adamw(lr=1e-3", "adamw(lr=1e-3, eps=1e-4"),
                     ("reward = len(kept)", "reward = sum(kept.logprobs by seq)")):  # a gradient that is no noise
        text = text.replace(old, new)
    program.write_text(text)
    alone = placement(1, **{f"{m}_*": "on mesh(0:1)" for m in models})
    there = placement(2, actor_generate="on mesh(0:2) dp=2", **{
        "actor_*": "on mesh(0:2) tp=2 backend=megatron", "slow_*": "on mesh(0:2) tp=2 backend=megatron",
        "critic_*": "on mesh(0:2) dp=2 zero=1 backend=megatron"})
    plan = compiled(program, sets, alone, tmp_path)
    assert set(runs.run(plan, tmp_path / "whole")) == {""}
    monkeypatch.setattr(runs, "_rank", on_one)
    assert set(runs.run(compiled(program, sets, there, tmp_path), tmp_path / "run", stop_after=3)) == {""}
    assert set(runs.run(plan, tmp_path / "run", resume=tmp_path / "run")) == {""}
    for mine, theirs in zip(runs.lines(tmp_path / "run"), runs.lines(tmp_path / "whole"), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


# ------------------------------------------------------------------------------------------------- what is refused


def refused(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch, installed: bool = True) -> list[Any]:
    monkeypatch.setattr("rldsl.placement.backends.lacking", lambda d: "" if installed else d.needs and d.needs[1] or "")
    (folder / "p.rlf").write_text(program)
    with pytest.raises(Failure) as caught:
        api.compile(str(folder / "p.rlf"), {}, None)
    return list(caught.value.diagnostics)


def program(model: Path, clause: str, kind: str = "") -> str:
    return (f'use std.sft (sft)\ndata rows = jsonl("answers.jsonl", batch=4)\n'
            f'model actor = causal_lm("{model}"{kind}) train adamw(lr=1e-3)\n'
            f"flow run(steps=1) {{\n  b = rows.next()\n  actor.train(b, loss=sft()) {clause}\n}}\n")


@pytest.mark.parametrize("clause, kind, words", [
    ("on mesh(0:4) dp=4 zero=2 backend=megatron", "", "`zero`"),
    ("on mesh(0:2) dp=2 backend=megatron", ", lora(r=4)", "adapters")])
def test_what_megatron_cannot_do_is_named(clause: str, kind: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    (d,) = refused(program(make_model(tmp_path / "m"), clause, kind), tmp_path, monkeypatch)
    assert d.code == "RL0327" and words in d.label and "backend=torch" in d.help and "backend=megatron" in d.span.text


@pytest.mark.parametrize("family, options, words", [
    ("gemma", dict(head_dim=8), "the family gemma"),
    ("llama", dict(attention_bias=True), "attention_bias"),
    ("llama", dict(mlp_bias=True), "mlp_bias"),
    ("llama", dict(hidden_act="gelu"), "the activation `gelu`"),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0)), "type `yarn`"),
    ("qwen3", dict(attention_bias=True), "the parameter model.layers.{}.self_attn.k_proj.bias")])
def test_families_that_it_cannot_express(family: str, options: dict[str, Any], words: str, tmp_path: Path,
                                         monkeypatch: Any) -> None:
    made = make_model(tmp_path / "m", family, **options)
    (d,) = refused(program(made, "on mesh(0:2) tp=2 backend=megatron"), tmp_path, monkeypatch)
    assert d.code == "RL0327" and words in d.label, d.label


def test_without_the_package_the_line_that_installs_it(tmp_path: Path, monkeypatch: Any) -> None:
    text = program(make_model(tmp_path / "m"), "on mesh(0:2) tp=2 backend=megatron")
    (d,) = refused(text, tmp_path, monkeypatch, installed=False)
    assert d.code == "RL0326" and "pip install 'rldsl[megatron]'" in d.help


@pytest.mark.parametrize("name, near", [("megatrom", "backend=megatron"), ("os", "backends: "), ("..os", "backends: ")])
def test_a_backend_that_there_is_not(name: str, near: str, tmp_path: Path, monkeypatch: Any) -> None:
    text = program(make_model(tmp_path / "m"), f'on mesh(0:2) tp=2 backend="{name}"')
    (d,) = refused(text, tmp_path, monkeypatch)
    assert d.code == "RL0312" and near in d.help


def test_a_computation_has_no_backend(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(Failure) as caught:
        grpo(tiny, tmp_path, **{"@adv": "on mesh(0:2) backend=megatron"})
    assert caught.value.diagnostics[0].code == "RL0311"


def test_calls_without_a_place_of_their_own_follow(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """As in degrees, unless they say otherwise."""
    monkeypatch.setattr("rldsl.placement.backends.lacking", lambda _: "")
    train = "on mesh(0:4) dp=2 tp=2 backend=megatron"
    for more, wanted in (({}, ["megatron"]), ({"actor_generate": "mbs=4"}, ["megatron"]),
                         ({"actor_generate": "backend=torch"}, ["megatron", "torch"])):
        plan = decode(grpo(tiny, tmp_path, actor_train=train, **more, **{"ref_*": "on mesh(0:4) dp=4"}), "p")
        used = {x.backend for x in plan.layouts for e, _ in events(plan)
                if getattr(e, "model", "") == "actor" and getattr(e, "layout", "") == x.id}
        assert sorted(used) == wanted


@pytest.mark.parametrize("change, code", [
    (dict(backend="elsewhere"), "RL0612"), (dict(backend="os.path"), "RL0612"),
    (dict(backend="megatron", zero=3), "RL0537")])
def test_the_verifier_knows_backends_by_what_they_describe(change: dict[str, Any], code: str, tiny: Path,
                                                           tmp_path: Path) -> None:
    plan = decode(grpo(tiny, tmp_path, **{"actor_*": "on mesh(0:4) dp=4", "ref_*": "on mesh(0:4) dp=4"}), "p")
    home = next(m.home for m in plan.models if m.home)
    layouts = tuple(replace(x, **change) if x.id == home else x for x in plan.layouts)
    with pytest.raises(Failure) as caught:
        verify(replace(plan, layouts=layouts))
    assert code in {d.code for d in caught.value.diagnostics}


def test_old_plans_are_as_they_were(tiny: Path, tmp_path: Path) -> None:
    data = grpo(tiny, tmp_path, **{"actor_*": "on mesh(0:4) dp=4", "ref_*": "on mesh(0:4) dp=4"})
    assert b"backend" not in data and all(x.backend == "torch" for x in decode(data, "p").layouts)


def test_texts_name_another_backend_than_the_usual(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from rldsl.plan.show import show

    monkeypatch.setattr("rldsl.placement.backends.lacking", lambda _: "")
    plan = decode(grpo(tiny, tmp_path, actor_train="on mesh(0:4) tp=2 pp=2 backend=megatron",
                       actor_generate="on mesh(0:4) dp=4", **{"ref_*": "on mesh(0:4) dp=4"}), "p")
    text = show(plan)
    assert "tp=2 pp=2 backend=megatron" in text and "backend=torch" not in text
