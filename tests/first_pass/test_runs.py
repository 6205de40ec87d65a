"""Whole runs with a pass before each minibatch: the numbers of a loss written otherwise, under every placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.events import Loop, Train
from tests.end_to_end.programs import Metrics, run_program
from tests.samples import thorough_unless
from tests.tiny import make_model

PROGRAM = Path(__file__).parent / "two.rlf"
PLACES = {
    "dp": "place *.train on mesh(0:4) dp=4 mbs=1\nplace slow.* on mesh(0:2) dp=2",
    "zero": "place *.train on mesh(0:4) dp=2 tp=2 zero=3 mbs=2\nplace slow.* on mesh(0:2) tp=2",
    "zero2": "place *.train on mesh(0:4) dp=4 zero=2 mbs=7 recompute=full\nplace slow.* on mesh(0:1)",
    "pp": "place *.train on mesh(0:4) dp=2 pp=2 vpp=2 mbs=1\nplace slow.* on mesh(2:4) dp=2",
    "cp": "place *.train on mesh(0:4) pp=2 cp=2 mbt=40\nplace slow.* on mesh(0:4) dp=4",
}


def made(root: Path, layers: int) -> dict[str, str]:
    """The parameters of a program for a new model and its data."""
    make_model(root / "m", num_hidden_layers=layers)
    rows = [{"prompt": "a b c d e"[: 1 + 2 * (i % 4)]} for i in range(16)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"base": str(root / "m"), "rows": str(root / "rows.jsonl")}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return made(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="module")
def alone(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return run_program(PROGRAM, sets, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Metrics]:
    """A layer for each chunk of two stages."""
    sets = made(tmp_path_factory.mktemp("deep"), layers=4)
    return sets, run_program(PROGRAM, sets, tmp_path_factory.mktemp("alone"))


def test_a_loss_written_otherwise_trains_alike(alone: Metrics) -> None:
    for step in alone:
        for name in ("loss", "grad_norm", "spread"):
            assert step[f"twice/{name}"] == pytest.approx(step[f"once/{name}"], rel=2e-5)
            assert step[f"once/{name}"] != 0
        assert 0.4 < step["whole/sharp"] < 0.7
    assert alone[0]["whole/loss"] != alone[1]["whole/loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_unless(lambda place: place in ("zero", "pp"), PLACES))
def test_a_placement_changes_no_number(request: pytest.FixtureRequest, place: str, tmp_path: Path) -> None:
    given = request.getfixturevalue
    sets, alone = given("deep") if "vpp" in PLACES[place] else (given("sets"), given("alone"))
    there = run_program(PROGRAM, sets, tmp_path, PLACES[place], like=alone)
    for a, b in zip(alone, there, strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=5e-4, abs=5e-6)


def test_who_needs_the_pass_and_whole_prompts(sets: dict[str, str]) -> None:
    plan = api.compile(str(PROGRAM), sets)
    (loop,) = [x for x in plan.body if isinstance(x, Loop)]
    trains = [x for x in loop.body if isinstance(x, Train)]
    units = {s.id: s.granularity for s in plan.spreads}
    assert [(e.model, bool(e.first_pass), units[e.spread]) for e in trains] == [
        ("once", False, "row"), ("twice", True, "row"), ("whole", True, "prompt"), ("whole", True, "prompt")]
    assert "exp(mean(adv * logprobs))" in trains[1].first_pass and "two.rlf" in trains[1].first_pass


CONTINUED = """data prompts = jsonl("{rows}", batch=4, max_prompt_tokens=16)
model slow  = causal_lm("{base}")
model actor = causal_lm("{base}") train adamw(lr=1e-3)
loss grouped(logprobs: token; r: seq, fair: seq) {{
  metric same = max(abs(r - mean(r by prompt) - fair))
  return {objective}
}}
flow run(steps=1, seed=1) {{
  prompt = prompts.next()
  gen  = slow.generate(prompt, n=2, max_new_tokens=3, temperature=0.8, min_new_tokens=3)
  more = slow.generate(gen, n=2, max_new_tokens=4, temperature=0.8)
  r    = len(more) + mean(more.logprobs by seq)
  actor.train(more, loss=grouped(r=r, fair=r - mean(r by prompt)), minibatches=2)
}}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["mean((r - mean(r by prompt)) * sum(logprobs by seq))",
                                       "mean(max(r * sum(logprobs by seq) by prompt) * mean(r by prompt))"])
def test_prompts_that_are_responses(sets: dict[str, str], tmp_path: Path, objective: str) -> None:
    """What continues a response is reduced up to it, on any placement and in minibatches of any size."""
    path = tmp_path / "continued.rlf"
    path.write_text(CONTINUED.format(objective=objective, **sets))
    alone = run_program(path, {}, tmp_path / "alone")
    assert abs(alone[0]["actor/loss"]) > 1e-3 and alone[0]["actor/same"] < 1e-5
    for place in ("on mesh(0:2) dp=2", "on mesh(0:1) mbs=1", "on mesh(0:2) dp=2 mbs=3"):
        there = run_program(path, {}, tmp_path / "there", f"place *.* {place}", like=alone)
        assert alone[0] == pytest.approx(there[0], rel=1e-4, abs=1e-5), place
