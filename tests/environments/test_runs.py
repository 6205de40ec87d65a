"""Conversations run; neither placements nor the order in which environments answer change a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.environments.programs import TALK, folder, run

LONGER = TALK.replace("max_new_tokens=4", "max_new_tokens=6")  # so that some conversations are stopped
BODY = f"""
  prompt = prompts.next()
  {LONGER}
  adv = per_token(group_norm(gen.reward + 0.1 * len(gen)), gen.logprobs)
  kept = gen where gen.turns > 2
  metric gap     = max(abs(gen.logprobs - actor.logprobs(gen)))
  actor.train(gen, loss=pg(adv=adv), minibatches=2)
  metric reward  = mean(gen.reward)
  metric turns   = sum(gen.turns)
  metric stopped = sum(gen.stopped)
  metric lp      = mean(gen.logprobs)
  metric own     = sum(len(gen))
  metric steps   = sum(discount(gen.logprobs, 0.9))
  metric kept    = count(kept.logprobs)
  size           = count(gen.logprobs by turn)
  late           = discount(gen.turn_reward, 0.5)
  metric drawn   = mean(uniform(gen.turn_reward) * gen.logprobs)
  metric heard   = sum(gen.turn_reward)
  metric sizes   = sum(size) - sum(len(gen))
  metric spoken  = max(count(size by seq)) - max(gen.turns)
  metric late    = mean(late * gen.logprobs)
  metric by_turn = mean(sum(late * size by seq) - sum(per_token(late, gen.logprobs) by seq))
  metric shift   = sum(prev(next(size))) + sum(where(next(size) > 0, 0, size))
  metric kept_t  = mean(kept.turn_reward + mean(kept.logprobs by turn))
  metric kept_lp = mean(kept.logprobs)
"""
TURNS = ("drawn", "heard", "sizes", "spoken", "late", "by_turn", "shift", "kept_t")
NAMES = (*TURNS, "gap", "reward", "turns", "stopped", "lp", "own", "steps", "kept", "kept_lp", "actor/loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("runs"))


def numbers(lines: list[dict[str, Any]], names: tuple[str, ...] = NAMES) -> list[dict[str, float]]:
    return [{n: line[n] for n in names} for line in lines]


@pytest.fixture(scope="module")
def alone(base: Path) -> list[dict[str, float]]:
    return numbers(run(base, BODY, options=", invariant=true"))


@pytest.mark.thorough
def test_sampled_log_probs_are_those_of_a_forward_pass(alone: list[dict[str, float]]) -> None:
    """Bit for bit, also at the first token of a turn, which follows a token of the environment."""
    assert [step["gap"] for step in alone] == [0.0, 0.0]
    assert all(step["turns"] > 8 and step["stopped"] > 0 and step["actor/grad_norm"] > 0 for step in alone)
    assert all(0 < step["kept"] < step["own"] for step in alone)


def test_turns_add_up(alone: list[dict[str, float]]) -> None:
    for step in alone:
        assert step["sizes"] == step["spoken"] == 0 and step["by_turn"] == pytest.approx(0, abs=1e-5)
        assert 0 < step["heard"] <= step["own"] and step["late"] < 0


@pytest.mark.thorough
@pytest.mark.parametrize("delays, place", [
    (1, None), (2, "place actor.generate on mesh(0:1) mbs=3"), (3, "place *.* on mesh(0:2) dp=2"),
    (4, "place *.* on mesh(0:2) dp=2 mbs=2"), (5, "place actor.generate on mesh(0:1) mbs=2 waiting=offload"),
    (6, "place actor.generate on mesh(0:1) mbs=1 waiting=recompute"),
])
def test_neither_the_order_of_answers_nor_slots_nor_dp_change_a_number(
        base: Path, alone: list[dict[str, float]], delays: int, place: str | None) -> None:
    found = numbers(run(base, BODY, options=", invariant=true", delays=delays, place=place))
    if "dp" not in (place or ""):
        assert found == alone
    first = (*TURNS, "gap", "reward", "turns", "stopped", "lp", "own", "steps", "kept", "kept_lp")
    assert {n: found[0][n] for n in first} == {n: alone[0][n] for n in first}  # before anything is trained
    assert found[1] == {n: pytest.approx(v, rel=1e-4, abs=1e-6) for n, v in alone[1].items()}


@pytest.mark.thorough
@pytest.mark.parametrize("delays, place", [
    (5, "mesh(0:2) tp=2"), (6, "mesh(0:2) pp=2 mbs=3"), (8, "mesh(0:2) pp=2 mbs=1 waiting=offload"), (None, "mesh(0:4) tp=2 pp=2"), (7, "mesh(0:4) dp=4 mbs=1"),
])
def test_neither_do_degrees_of_the_generate(base: Path, alone: list[dict[str, float]], delays: int | None, place: str
                                            ) -> None:
    """The losses, too: training stays on one rank."""
    rest = "place actor.train on mesh(0:1)\nplace actor.logprobs on mesh(0:1)"
    assert numbers(run(base, BODY, options=", invariant=true", delays=delays,
                       place=f"place actor.generate on {place}\n{rest}")) == alone


@pytest.mark.parametrize("place", [
    "place actor.generate on mesh(0:2) dp=2\nplace actor.logprobs on mesh(0:2) tp=2\n"
    "place actor.train on mesh(0:2) pp=2",
    "place actor.generate on mesh(0:1)\nplace actor.train on mesh(0:2) cp=2\nplace actor.logprobs on mesh(0:2) cp=2",
])
def test_training_is_divided_in_any_way(base: Path, alone: list[dict[str, float]], place: str) -> None:
    found = numbers(run(base, BODY, options=", invariant=true", place=place))
    assert found == [{n: pytest.approx(v, rel=1e-4, abs=1e-5) for n, v in step.items()} for step in alone]


@pytest.mark.parametrize("place", [None, "place actor.generate on mesh(0:2) pp=2\nplace actor.train on mesh(0:2) tp=2"])
def test_what_conversations_did_is_measured(base: Path, place: str | None) -> None:
    found = run(base, f"prompt = prompts.next()\n{TALK}\n{TRAIN}\nmetric mean_turns = mean(gen.turns)", place=place)
    assert len(found) == 2
    for line in found:
        assert line["conversation/turns"] == line["mean_turns"] and line["conversation/errors"] == 0
        assert 0 < line["conversation/waiting"] < 1 and line["conversation/tool_seconds"] > 0


def test_a_run_without_conversations_measures_none(base: Path) -> None:
    found = run(base, "prompt = prompts.next()\ngen = actor.generate(prompt, max_new_tokens=4)\nmetric n = mean(len(gen))",
                steps=1)
    assert not any(name.startswith("conversation/") for name in found[0])


TRAIN = """
  actor.train(gen, loss=pg(adv=per_token(group_norm(gen.reward + 0.1 * len(gen)), gen.logprobs)))
  metric reward = mean(gen.reward)
"""
REPEAT = f"""
  repeat {{
    prompt = prompts.next()
    {TALK}
    kept = gen where gen.turns > 2
  }} until count(kept) >= 6 max 3
  actor.train(kept, loss=pg(adv=per_token(kept.reward, kept.logprobs)))
  metric least = min(kept.turns) - min(count(mean(kept.logprobs by turn) by seq))
  metric turns = min(kept.turns)
"""
EVAL = f"""
  prompt = prompts.next()
  {TALK}
  {TRAIN}
  every 2 {{ eval held {{
    q = held.next()
    h = actor.generate(q, env=Guess, greedy=true, max_turns=2, max_new_tokens=4, max_tokens=40)
    metric most = max(h.turns)
  }} }}
"""


def test_generated_ahead_of_the_step(base: Path) -> None:
    found = run(base, f"prompt = prompts.next()\n{TALK}\n{TRAIN}", steps="3, lag=1",
                place="place actor.generate on mesh(0:1)\nplace actor.train on mesh(1:2)")
    assert len(found) == 3 and all(line["reward"] > 0 for line in found)


def test_collected_until_there_are_enough(base: Path) -> None:
    found = run(base, REPEAT, place="place *.* on mesh(0:2) dp=2")
    assert [(line["turns"], line["least"]) for line in found] == [(3, 0), (3, 0)]


def test_in_an_evaluation(base: Path) -> None:
    found = run(base, EVAL, top='data held = jsonl("prompts.jsonl", batch=5, max_prompt_tokens=16)')
    assert found[1]["most"] == 2 and "most" not in found[0]
