"""Whole programs whose calls run on Megatron: the same losses and samples as on torch, what moves between the two, and
what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rldsl.plan.codec import decode
from rldsl.plan.events import Realloc
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.sharding.boxes import itemsize, parameters, pieces_of_rank, slices
from rldsl.sharding.dtypes import in_wire_dtypes
from tests.checkpoint import runs
from tests.end_to_end.test_invariance import placement
from tests.megatron.programs import END_TO_END, EXAMPLES, GRPO, alike, compiled, grpo, results
from tests.megatron.shards import needed, on_cpu
from tests.tiny import make_all

MESH = "on mesh(0:4)"
ALL = {"actor_*": f"{MESH} dp=4", "ref_*": f"{MESH} dp=4"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


@pytest.mark.thorough
def test_grpo_is_the_same_on_megatron(tiny: Path, tmp_path: Path) -> None:
    """The example, with a reward that a random model can earn."""
    needed()
    program = tmp_path / "grpo.rlf"
    program.write_text((EXAMPLES / "grpo.rlf").read_text())
    rewards = (END_TO_END / "rewards_small.py").read_text()
    (tmp_path / "rewards.py").write_text(rewards.replace("def digits", "def exact_match"))
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "lr": 1e-3, "steps": 3,
            "batch": 2, "tokens": 4}
    mixed = {"actor_train": f"{MESH} tp=2 pp=2 backend=megatron",
             "actor_generate": f"{MESH} dp=2 tp=2 backend=megatron", "ref_*": f"{MESH} dp=2 pp=2"}
    plans = [compiled(program, sets, placement(4, **calls), tmp_path) for calls in (ALL, mixed)]
    (torch, drawn), (megatron, sampled) = results(plans, tmp_path, 4)
    assert len({len(tokens) for tokens in drawn.values()}) > 1 and torch[0]["actor/loss"] != torch[-1]["actor/loss"]
    alike(megatron, torch)
    assert len(drawn) == 3 * 2 * 8 and sampled == drawn


@pytest.mark.thorough
def test_ppo_is_the_same_on_megatron(tiny: Path, tmp_path: Path) -> None:
    needed()
    sets = {"base": str(tiny / "models/sft"), "rm": str(tiny / "models/rm"), "rows": str(tiny / "data/prompts.jsonl"),
            "lr": 1e-3, "steps": 3, "batch": 8, "tokens": 4}
    program = tmp_path / "ppo.rlf"
    program.write_text((EXAMPLES / "ppo.rlf").read_text().replace("cluster nodes=1 gpus=8\n", ""))
    plain = placement(4, **{f"{m}_*": f"{MESH} dp=4" for m in ("actor", "critic", "ref", "judge")})
    mixed = placement(4, actor_generate=f"{MESH} dp=4", actor_train=f"{MESH} dp=2 pp=2 backend=megatron",
                      critic_train="on mesh(0:2) tp=2 backend=megatron", critic_values="on mesh(2:4) dp=2",
                      **{"ref_*": "on mesh(0:2) cp=2 backend=megatron",
                         "judge_*": "on mesh(2:4) pp=2 backend=megatron"})
    plans = [compiled(program, sets, p, tmp_path) for p in (plain, mixed)]
    (torch, drawn), (megatron, sampled) = results(plans, tmp_path, 4)
    alike(megatron, torch)
    assert len(drawn) == 3 * 8 and sampled == drawn


def lacking(plan: Plan, event: Realloc) -> int:
    """Bytes of boxes that ranks of the destination have not before it, found element by element."""
    layouts, meshes = {x.id: x for x in plan.layouts}, {m.id: m for m in plan.meshes}
    src, dst = layouts[event.src], layouts[event.dst]
    model = next(m for m in plan.models if m.name == event.model)
    (moved,), total = in_wire_dtypes(model, src.id, model, dst.id, 0.0), 0
    for p in parameters(model):
        for rank in meshes[dst.mesh].members():
            there = np.zeros(p.spec.shape, bool)
            for x, value in ((dst, True), (src, False)):
                for piece in pieces_of_rank(p, model.layers, x, meshes[x.mesh], rank):
                    there[slices(piece.box)] = value
            total += int(there.sum()) * itemsize(moved)
    return total


@pytest.mark.parametrize("train, generate", [
    ("tp=2 pp=2 backend=megatron", "dp=4"), ("dp=4 zero=1", "tp=2 pp=2 backend=megatron"),
    ("dp=2 tp=2", "dp=2 tp=2 backend=megatron"), ("dp=2 pp=2 backend=megatron", "dp=2 pp=2")])
def test_what_moves_between_backends_is_what_is_lacking(train: str, generate: str, tiny: Path, tmp_path: Path,
                                                        monkeypatch: Any) -> None:
    """And no more than between two layouts of one backend; with equal degrees nothing."""
    monkeypatch.setattr("rldsl.placement.backends.lacking", lambda _: "")
    found = []
    for there, here in ((train, generate), [x.replace(" backend=megatron", "") for x in (train, generate)]):
        calls = {"actor_train": f"{MESH} {there}", "actor_generate": f"{MESH} {here}", "ref_*": f"{MESH} dp=4"}
        plan = decode(grpo(tiny, tmp_path, **calls), "p")
        moves = [e for e, _ in event_paths(plan) if isinstance(e, Realloc)]
        found.append(sum(e.bytes for e in moves))
        assert found[-1] == sum(lacking(plan, e) for e in moves)
    assert found[0] == found[1] and (found[0] > 0) == (train.split()[:2] != generate.split()[:2])


def test_a_save_is_the_directory_bit_by_bit(tmp_path: Path) -> None:
    """HuggingFace -> Megatron -> HuggingFace: a step of no length, and the weights are those that were read."""
    needed()
    from safetensors.torch import load_file

    tiny = make_all(tmp_path / "tiny", family="llama", attention_bias=True, mlp_bias=True,
                    num_hidden_layers=2)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "lr": 0.0, "steps": 1,
            "every_step": 1}
    calls = {"actor_*": f"{MESH} tp=2 pp=2 backend=megatron", "ref_*": f"{MESH} dp=4"}
    results([compiled(GRPO, sets, placement(4, **calls), tmp_path)], tmp_path, 4)
    before = load_file(str(tiny / "models/sft/model.safetensors"))
    (saved,) = {p.parent for p in (tmp_path / "out").rglob("model*.safetensors")}
    after = {k: v for file in saved.glob("*.safetensors") for k, v in load_file(str(file)).items()}
    assert after.keys() == before.keys() and all((after[k] == before[k]).all() for k in before)


def on_one(rank: int, *given: Any) -> str:
    on_cpu()
    return runs._rank(rank, *given)


@pytest.mark.thorough
def test_a_run_resumes_under_the_other_backend(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, moments, averages and the schedule: three steps on Megatron and three on torch are six on torch."""
    needed()
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    program, models = tmp_path / "small.rlf", ("actor", "slow", "critic")
    text = (END_TO_END.parent / "checkpoint" / "small.rlf").read_text()
    for old, new in (("(rows, batch=4)", "(rows, batch=4, max_prompt_tokens=16)"),
                     ("adamw(lr=1e-3", "adamw(lr=1e-3, eps=1e-4"),
                     # no noise in the gradient: rewards that differ, and are the same under every placement
                     ("reward = len(kept)", "reward = sum(uniform(kept.logprobs) by seq)")):
        assert old in text
        text = text.replace(old, new)
    program.write_text(text)
    alone = placement(1, **{f"{m}_*": "on mesh(0:1)" for m in models})
    there = placement(2, actor_generate="on mesh(0:2) dp=2", **{
        "actor_*": "on mesh(0:2) tp=2 backend=megatron", "slow_*": "on mesh(0:2) tp=2 backend=megatron",
        "critic_*": "on mesh(0:2) dp=2 zero=1 backend=megatron"})
    plan = compiled(program, sets, alone, tmp_path)
    assert set(runs.run(plan, tmp_path / "whole")) == {""}
    monkeypatch.setattr(runs, "_rank", on_one)
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert set(runs.run(compiled(program, sets, there, tmp_path), out, stop_after=3, like=whole)) == {""}
    assert set(runs.run(plan, out, resume=out, like=whole)) == {""}
    for mine, theirs in zip(runs.lines(tmp_path / "run"), runs.lines(tmp_path / "whole"), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}
