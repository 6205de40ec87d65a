"""`lag=k`: a step trains on what was begun k steps earlier, the same on every placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import HERE, compare, everywhere, placement
from tests.lag.programs import PROGRAMS
from tests.samples import thorough_between
from tests.tiny import make_all

GRPO = {
    "colocated": everywhere(2, "dp=2", "actor", "ref"),
    "disjoint": placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) tp=2", **{
        "ref_*": "on mesh(2:4) dp=2"}),
    "other_mesh": placement(4, actor_generate="on mesh(3:4)", actor_train="on mesh(0:2) pp=2", **{
        "ref_*": "on mesh(2:3)"}),
}
# (program, lag) -> placements
MORE = {
    ("ppo", 1): [
        placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) dp=2 zero=2",
                  actor_logprobs="on mesh(2:4) tp=2", **{"critic_*": "on mesh(2:4) dp=2", "judge_*": "on mesh(2:3)",
                                                         "ref_*": "on mesh(3:4) offload=true"}),
        placement(2, actor_generate="on mesh(0:2) tp=2 keep=false", **{
            "actor_logprobs": "on mesh(0:2) dp=2", "actor_train": "on mesh(0:2) dp=2 offload=true",
            "critic_*": "on mesh(0:2) pp=2", "judge_*": "on mesh(0:1)", "ref_*": "on mesh(1:2)"}),
    ],
    ("much", 2): [
        placement(4, slow_generate="on mesh(0:2) dp=2", actor_generate="on mesh(1:2)",
                  actor_train="on mesh(2:4) dp=2"),
        everywhere(2, "dp=2", "actor", "slow"),
    ],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def run(tiny: Path, folder: Path, text: str, place: str, like: Metrics | None = None) -> Metrics:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    (folder / "lagged.rlf").write_text(text)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    sets |= {"rm": str(tiny / "models/rm")} if "param rm" in text else {"batch": 5, "steps": 4}
    return run_program(folder / "lagged.rlf", sets, folder, place, like=like)


def grpo(lag: int) -> str:
    return (HERE / "grpo_small.rlf").read_text().replace("seed=7)", f"seed=7, lag={lag})")


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Metrics]:
    """On one rank, by lag."""
    return {lag: run(tiny, tmp_path_factory.mktemp("alone"), grpo(lag), everywhere(1, "dp=1", "actor", "ref"))
            for lag in (0, 1, 2)}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "lag"), thorough_between([("colocated", 1), ("disjoint", 1), ("disjoint", 2), ("other_mesh", 2)]))
def test_grpo_is_the_same_on_every_placement(name: str, lag: int, tiny: Path, alone: dict[int, Metrics],
                                             tmp_path: Path) -> None:
    compare(run(tiny, tmp_path, grpo(lag), GRPO[name], alone[lag]), alone[lag])


def test_a_lag_changes_what_is_trained_on(alone: dict[int, Metrics]) -> None:
    """The first step trains on responses of the initial policy; with a lag, so do the next ones."""
    losses = {lag: [line["actor/loss"] for line in lines] for lag, lines in alone.items()}
    assert losses[0][0] == losses[1][0] == losses[2][0]
    assert losses[0][1] != losses[1][1] and losses[1][1] == losses[2][1]
    assert losses[1][2] != losses[2][2]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "lag"), thorough_between(MORE))
def test_programs_are_the_same_on_every_placement(name: str, lag: int, tiny: Path, tmp_path: Path) -> None:
    text = PROGRAMS[name].replace("{lag}", str(lag))
    one = run(tiny, tmp_path / "one", text, "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n")
    for i, place in enumerate(MORE[name, lag]):
        compare(run(tiny, tmp_path / str(i), text, place, one), one)


def test_a_call_in_its_own_step(tiny: Path, tmp_path: Path) -> None:
    """With the policy of the step, also in a block; what else is generated runs ahead."""
    text = grpo(1).replace("  metric length", """  now    = actor.generate(prompt, greedy=true, max_new_tokens=5, lag=0)
  metric now = mean(digits(now))
  every 2 {
    more = actor.generate(now, max_new_tokens=3, lag=0)
    metric more = mean(digits(more))
  }
  metric length""", 1)
    one = run(tiny, tmp_path / "one", text, everywhere(1, "dp=1", "actor", "ref"))
    assert "now" in one[0] and "more" in one[1]
    compare(run(tiny, tmp_path / "apart", text, GRPO["disjoint"], one), one)


@pytest.mark.thorough
def test_generation_below_training(tiny: Path, tmp_path: Path) -> None:
    """It runs ahead with the policy after the training of the turn, which is not the one above it; on one rank both use
    the trained copy, on others the copy is refreshed twice in a turn."""
    text = grpo(1).replace("  every every_step", """  more = actor.generate(gen, n=2, max_new_tokens=3)
  metric more = mean(digits(more))
  metric lp   = mean(more.logprobs)
  every every_step""", 1)
    one = run(tiny, tmp_path / "one", text, everywhere(1, "dp=1", "actor", "ref"))
    for i, name in enumerate(("colocated", "disjoint")):
        compare(run(tiny, tmp_path / str(i), text, GRPO[name], one), one)
