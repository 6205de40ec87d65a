"""Whole programs with sequences divided over ranks: the losses of one rank, sampled tokens included."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.plan.codec import decode
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.projection import event_paths
from rldsl.plan.metrics_file import MEASURED
from rldsl.sharding.boxes import cell_of
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.end_to_end.test_invariance import DPO, HERE, PPO, placement
from tests.samples import thorough_between
from tests.tiny import make_all

GRPO = HERE / "grpo_small.rlf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=3)


def sets(tiny: Path, program: Path) -> dict[str, object]:
    base = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "steps": 2}
    if program == DPO:
        return base | {"rows": str(tiny / "data/pairs.jsonl"), "batch": 4, "lr": 1e-3}
    if program == PPO:
        return base | {"rm": str(tiny / "models/rm"), "lr": 1e-3, "batch": 4, "tokens": 4}
    return base | {"batch": 4, "samples": 3, "tokens": 4}


def run(tiny: Path, program: Path, folder: Path, place: str, like: Metrics | None = None) -> Metrics:
    copy = folder / program.name
    copy.write_text(program.read_text().replace("cluster nodes=1 gpus=8\n", "").replace("lr=5e-7", "lr=1e-3"))
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    given = {k: v for k, v in sets(tiny, program).items() if f"param {k} " in copy.read_text()}
    return run_program(copy, given, folder, place, like=like)


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    found: dict[Path, Metrics] = {}

    def of(program: Path) -> Metrics:
        if program not in found:
            where = {f"{m}_*": "on mesh(0:1) dp=1" for m in ("actor", "ref", "critic", "judge")
                     if f"model {m} " in program.read_text()}
            found[program] = run(tiny, program, tmp_path_factory.mktemp("alone"), placement(1, **where))
        return found[program]

    return of


PLACEMENTS = {
    "grpo_cp2": (GRPO, placement(2, actor_train="on mesh(0:2) cp=2", **{"ref_*": "on mesh(0:2) cp=2"})),
    "grpo_cp4_recompute": (GRPO, placement(4, actor_train="on mesh(0:4) cp=4 recompute=full mbs=5",
                                           **{"ref_*": "on mesh(2:4) cp=2"})),
    "grpo_cp2_tp2": (GRPO, placement(4, actor_train="on mesh(0:4) tp=2 cp=2", actor_generate="on mesh(0:4) tp=4",
                                     **{"ref_*": "on mesh(0:4) tp=2 cp=2"})),
    "grpo_cp2_dp2": (GRPO, placement(4, actor_train="on mesh(0:4) dp=2 cp=2", **{"ref_*": "on mesh(0:4) pp=2 cp=2"})),
    "dpo_cp2_pp2": (DPO, placement(4, **{"actor_*": "on mesh(0:4) pp=2 cp=2 mbs=2", "ref_*": "on mesh(0:2) cp=2"})),
    "ppo_cp2": (PPO, placement(4, actor_train="on mesh(0:2) cp=2", actor_generate="on mesh(0:4) dp=4", **{
        "critic_*": "on mesh(2:4) cp=2", "judge_*": "on mesh(0:4) cp=4", "ref_*": "on mesh(0:2) dp=2"})),
}


@pytest.mark.parametrize("name", thorough_between(PLACEMENTS))
def test_a_program_is_the_same(name, tiny, alone, tmp_path):
    program, place = PLACEMENTS[name]
    expected = alone(program)
    found = run(tiny, program, tmp_path, place, expected if program != DPO else None)
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found, expected):
        for key, value in theirs.items():
            if not key.startswith(MEASURED):
                assert mine[key] == pytest.approx(value, rel=1e-4, abs=1e-5), f"step {theirs['step']}: {key}"


def test_a_generation_without_a_place_has_dp_for_cp(tiny, tmp_path):
    """It holds the boxes of the train call, so nothing moves between ranks."""
    place = placement(4, actor_train="on mesh(0:4) dp=2 cp=2")
    plan = decode(compile_program(GRPO, sets(tiny, GRPO), place, tmp_path), "grpo.plan")
    layouts = {x.id: x for x in plan.layouts}
    seen = {type(e): layouts[e.layout] for e, _ in event_paths(plan) if isinstance(e, Generate | Train | Infer)}
    assert (seen[Train].dp, seen[Train].cp) == (2, 2)
    assert (seen[Generate].dp, seen[Generate].cp) == (4, 1)
    assert {g.axis for g in plan.groups} == {"dp", "cp", "mesh"}
    (mesh,) = [m for m in plan.meshes if m.id == seen[Train].mesh]
    assert all(cell_of(seen[Train], mesh, rank) == cell_of(seen[Generate], mesh, rank) for rank in range(4))
