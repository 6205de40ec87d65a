"""The placement never changes numbers: the same program on one rank and on many, sampled tokens included, but for the
rare random number that rounding decides about (`tests/responses.py`).

Three steps, so that a wrong gradient or reallocation would show in the step after it, and a wrong state of the
optimizer in the one after that.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.plan.metrics_file import MEASURED
from tests.end_to_end.programs import Metrics, run_program
from tests.samples import thorough_between
from tests.tiny import make_all

HERE = Path(__file__).parent
STEPS = 3
PPO = HERE.parents[1] / "examples" / "ppo.rlf"


def placement(ranks: int, **calls: str) -> str:
    """A placement file for `ranks` devices; calls: "actor_train" -> "on mesh(0:2) dp=2"."""
    rules = [f"place {name.replace('_', '.')} {where}" for name, where in calls.items()]
    return "\n".join([f"cluster nodes=1 gpus={ranks}", *rules]) + "\n"


def everywhere(ranks: int, where: str, *models: str) -> str:
    return placement(ranks, **{f"{m}_*": f"on mesh(0:{ranks}) {where}" for m in models})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Of three layers, which two stages do not divide evenly."""
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=3)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Of a layer for each of four stages."""
    return make_all(tmp_path_factory.mktemp("four"), tie_word_embeddings=True)


def compare(found: Metrics, expected: Metrics) -> None:
    assert len(found) == len(expected) >= STEPS
    for mine, theirs in zip(found, expected):
        for name, value in theirs.items():
            if name.startswith(MEASURED):
                continue
            near = pytest.approx(value, rel=1e-4, abs=1e-5)
            assert mine[name] == near, f"step {theirs['step']}: {name} is {mine[name]}, on one rank {value}"


GRPO_PLACEMENTS = {
    "dp4": everywhere(4, "dp=4", "actor", "ref"),
    "tp2": everywhere(2, "tp=2", "actor", "ref"),
    "pp2": everywhere(2, "pp=2", "actor", "ref"),
    "dp2_tp2_pp2": everywhere(8, "dp=2 tp=2 pp=2 mbs=6", "actor", "ref"),
    "disjoint": placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) tp=2", **{
        "ref_*": "on mesh(0:1) dp=1"}),
    "demo": placement(4, actor_generate="on mesh(0:4) dp=4", actor_train="on mesh(0:4) dp=2 tp=2", **{
        "ref_*": "on mesh(2:4) dp=2"}),
    "kv_replicated": placement(4, actor_generate="on mesh(0:4) tp=4 mbs=13", actor_train="on mesh(0:4) tp=2 pp=2", **{
        "ref_*": "on mesh(0:2) pp=2"}),
}


@pytest.fixture(scope="module")
def grpo_alone(tiny, tmp_path_factory) -> Metrics:
    return grpo(tiny, tmp_path_factory.mktemp("alone"), everywhere(1, "dp=1", "actor", "ref"))


def grpo(tiny: Path, folder: Path, place: str, like: Metrics | None = None) -> Metrics:
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl"), "batch": 5, "steps": STEPS, "tokens": 4}
    return run_program(HERE / "grpo_small.rlf", sets, folder, place, like=like)


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_between(GRPO_PLACEMENTS))
def test_grpo_is_the_same_on_every_placement(name, tiny, grpo_alone, tmp_path):
    compare(grpo(tiny, tmp_path, GRPO_PLACEMENTS[name], grpo_alone), grpo_alone)


def test_grpo_learns_something_to_compare(grpo_alone):
    """The comparison would mean little if nothing moved."""
    assert grpo_alone[0]["kl"] == pytest.approx(0, abs=1e-5) and abs(grpo_alone[-1]["kl"]) > 1e-3
    assert len({step["length"] for step in grpo_alone}) > 1


CALLS = ("actor", "critic", "ref", "judge")
PPO_PLACEMENTS = {
    "real": None,  # as ppo.rlf itself says: the allocation of ReaL's authors on 8 ranks, pp=4 too
    "dp2": everywhere(2, "dp=2", *CALLS),
    "tp2": everywhere(2, "tp=2", *CALLS),
    "tp2_pp2": everywhere(4, "tp=2 pp=2", *CALLS),
    "disjoint": placement(4, **{"actor_*": "on mesh(0:2) dp=2", "critic_*": "on mesh(2:4) tp=2",
                                "ref_*": "on mesh(2:3) dp=1", "judge_*": "on mesh(3:4) dp=1"}),
}


def ppo(tiny: Path, folder: Path, place: str | None, like: Metrics | None = None) -> Metrics:
    sets = {"base": str(tiny / "models/sft"), "rm": str(tiny / "models/rm"), "rows": str(tiny / "data/prompts.jsonl"),
            "lr": 1e-3, "steps": STEPS, "batch": 8, "tokens": 4}
    text = PPO.read_text().replace("minibatches=4", "minibatches=2")
    if place is not None:  # the program's own cluster would contradict the placement's
        text = text.replace("cluster nodes=1 gpus=8\n", "")
    program = folder / "ppo.rlf"
    program.write_text(text)
    return run_program(program, sets, folder, place, like=like)


@pytest.fixture(scope="module")
def ppo_alone(four, tmp_path_factory) -> Metrics:
    return ppo(four, tmp_path_factory.mktemp("alone"), everywhere(1, "dp=1", *CALLS))


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_between(PPO_PLACEMENTS))
def test_ppo_is_the_same_on_every_placement(name, four, ppo_alone, tmp_path):
    compare(ppo(four, tmp_path, PPO_PLACEMENTS[name], ppo_alone), ppo_alone)


DPO = HERE.parents[1] / "examples" / "dpo.rlf"
DPO_PLACEMENTS = {
    "dp2": everywhere(2, "dp=2", "actor", "ref"),
    "pp2_one_pair_at_a_time": everywhere(2, "pp=2 mbs=2", "actor", "ref"),
    "tp2_beside_pp2": placement(4, **{"actor_*": "on mesh(0:2) tp=2", "ref_*": "on mesh(2:4) pp=2 mbs=3"}),
}


def dpo(tiny: Path, folder: Path, place: str) -> Metrics:
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/pairs.jsonl"), "steps": STEPS, "batch": 8}
    program = folder / "dpo.rlf"
    program.write_text(DPO.read_text().replace("lr=5e-7", "lr=1e-3"))
    return run_program(program, sets, folder, place)


@pytest.fixture(scope="module")
def dpo_alone(tiny, tmp_path_factory) -> Metrics:
    return dpo(tiny, tmp_path_factory.mktemp("alone"), everywhere(1, "dp=1", "actor", "ref"))


@pytest.mark.parametrize("name", thorough_between(DPO_PLACEMENTS))
def test_dpo_is_the_same_on_every_placement(name, tiny, dpo_alone, tmp_path):
    """Micro-batches and stages too, where ReaL took the reference's values from the wrong rows (defect 7)."""
    found = dpo(tiny, tmp_path, DPO_PLACEMENTS[name])
    compare(found, dpo_alone)
    assert dpo_alone[0]["actor/loss"] != dpo_alone[-1]["actor/loss"]
