"""Random numbers follow names: a statement more, or in another place, changes no sample of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection.programs import folder, numbers, run

SAMPLED = "  gen = actor.generate(prompt, n=4, max_new_tokens=6)\n"
HALF = "  half = gen where uniform(len(gen)) < 0.5\n"
REST = """
  metric kept = count(half)
  metric length = mean(len(gen))
  metric sure = mean(gen.logprobs)
  metric coin = mean(uniform(len(gen)))
  actor.train(half, loss=nll(), minibatches=2)"""
PROMPT = "  prompt = prompts.next()\n"
OTHER = "  other = actor.generate(prompt, n=2, max_new_tokens=4)\n"
LOG = "  metric more = mean(uniform(other.logprobs))\n"
DRAW = "  toss = uniform(mean(len(other) by prompt))\n  metric toss = mean(toss)\n"
EVAL = """  every 1 { eval held max 4 {
    p = held.next()
    ans = actor.generate(p, n=2, max_new_tokens=4)
    metric score = mean(sum(ans.logprobs by seq)) + mean(uniform(len(ans)))
  } }
"""
HELD = 'data held = jsonl("prompts.jsonl", batch=12, max_prompt_tokens=16)'


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def alone(base: Path) -> list[dict[str, float]]:
    return numbers(run(base, PROMPT + SAMPLED + HALF + REST))


def of(found: list[dict[str, float]], like: list[dict[str, float]]) -> list[dict[str, float]]:
    """The numbers that the other run has, too."""
    return [{name: step[name] for name in before} for step, before in zip(found, like, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize(("body", "top"), [
    (PROMPT + OTHER + LOG + SAMPLED + HALF + REST, ""),
    (PROMPT + OTHER + DRAW + SAMPLED + "  third = gen where uniform(len(gen)) < 0.3\n" + HALF
     + "  metric third = count(third)\n" + REST, ""),
    (PROMPT + EVAL + SAMPLED + HALF + REST, HELD),
], ids=["a generate and a metric", "draws and a selection", "an eval"])
def test_a_statement_more_resamples_nothing(base: Path, alone: list[dict[str, float]], body: str, top: str) -> None:
    found = numbers(run(base, body, top=top))
    assert len(found[0]) > len(alone[0]), "the statement does something"
    assert of(found, alone) == alone


def test_another_name_draws_anew(base: Path, alone: list[dict[str, float]]) -> None:
    """So the comparison can fail, and two calls on the same prompts draw apart."""
    body = (PROMPT + SAMPLED + HALF + REST).replace("gen ", "made ").replace("(gen", "(made").replace("gen.", "made.")
    found = numbers(run(base, body))
    assert found[0].keys() == alone[0].keys() and found[0]["sure"] != alone[0]["sure"]


def test_calls_of_one_statement_draw_apart(base: Path) -> None:
    found = numbers(run(base, PROMPT + SAMPLED + "  d = uniform(len(gen)) - uniform(len(gen))\n  metric d = max(abs(d))\n"))
    assert all(step["d"] > 0.01 for step in found)


MORE = """  old = good.sample(3)
  prompt = prompts.next(weight=1 + prompts.rate)
  gen = actor.generate(prompt, n=2, max_new_tokens=4)
  more = actor.generate(gen, n=2, max_new_tokens=3)
  tail = actor.generate(prefixes(gen, every=2), max_new_tokens=2)
"""
ADDED = """  before = good.sample(2)
  first = prompts.next(weight=exp(-prompts.rate))
  other = actor.generate(first, max_new_tokens=3)
  side = actor.generate(gen, max_new_tokens=2)
  cut = actor.generate(prefixes(other, every=1), max_new_tokens=2)
  good2.add(side)
  late = good2.sample(2)
  metric added = mean(side.logprobs) + mean(cut.logprobs) + count(before) + count(late)
"""
USED = """  prompt.rate = prompt.rate + mean(len(gen) by prompt)
  good.add(gen)
  metric old = sum(old.logprobs)
  metric gen = mean(gen.logprobs)
  metric more = mean(more.logprobs)
  metric tail = mean(tail.logprobs)
  metric rate = mean(prompt.rate)
"""


def test_other_frames_change_no_continuation_replay_or_draw(base: Path) -> None:
    """Continuations, prefixes, rows of a buffer, prompts drawn by a state: other such frames among them change none."""
    top = "buffer good = rows(capacity=9)\nstate rate of prompts = 0.5"
    found = numbers(run(base, MORE + USED, top=top, steps=3, batch=3))
    first = MORE.splitlines(keepends=True)
    body = "".join(first[:3]) + ADDED + "".join(first[3:]) + USED
    with_others = numbers(run(base, body, top=f"{top}\nbuffer good2 = rows(capacity=9)", steps=3, batch=3))
    assert of(with_others, found) == found and found[-1]["old"] != 0 and len({step["gen"] for step in found}) == 3
    assert "added" in with_others[0]
