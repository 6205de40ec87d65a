"""Continuations run, and what they are does not depend on placements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.samples import thorough_between
from tests.selection.programs import folder, numbers, run

PLACES = [
    "place *.* on mesh(0:2) dp=2",
    "place *.* on mesh(0:2) tp=2",
    "place *.* on mesh(0:4) dp=2 pp=2\nplace actor.train on mesh(0:4) dp=4 zero=2",
    "place @gen on mesh(0:2) dp=2\nplace @more on mesh(2:4) tp=2\nplace actor.train on mesh(0:2) pp=2",
    "place @gen on mesh(0:1)\nplace @more on mesh(1:4) dp=3\nplace actor.train on mesh(0:4) dp=4 mbs=1",
    "place @tail on mesh(0:4) dp=4\nplace @gen on mesh(1:3) dp=2\nplace actor.train on mesh(2:4) dp=2",
]
BODY = """
  prompt = prompts.next()
  gen  = actor.generate(prompt, n=3, max_new_tokens=5)
  more = actor.generate(gen, n=2, max_new_tokens=4)
  tail = actor.generate(more, max_new_tokens=2, greedy=true)
  r    = spread(more)
  v    = mean(r by prompt)
  own  = parity(gen) + v - mean(v by prompt)
  kept = more where r > mean(r by prompt)
  chosen = where(r > mean(r by prompt), 1, 0)
  metric zero   = mean(over(spread(gen), kept)) - sum(chosen * spread(gen)) / sum(chosen)
  metric over   = mean(over(spread(gen), kept) - 2 * parity(gen) + over(r, kept))
  metric end    = mean(at_end(spread(gen), more) * more.logprobs)
  actor.train(more, loss=pg(adv=r, weight=own), minibatches=2)
  metric own    = mean(own)
  metric best   = mean(max(v by prompt))
  metric number = mean(column(tail))
  metric kept   = mean(len(kept))
  metric number_kept = count(kept.logprobs)
  metric lens   = mean(len(gen) + mean(len(more) by prompt) + 100 * mean(mean(len(tail) by prompt) by prompt))
  metric sum    = mean(sum(actor.logprobs(more) by prompt) + sum(gen.logprobs by seq))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("continued"))


@pytest.fixture(scope="module")
def alone(base: Path):
    return run(base, BODY, steps=3)


@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_no_placement_changes_a_number(base: Path, alone, place: str) -> None:
    found = numbers(run(base, BODY, steps=3, place=place, like=alone))
    assert len(found) == 3
    for mine, theirs in zip(found, numbers(alone), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


def test_a_value_of_what_a_selection_continues(alone) -> None:
    assert len(alone) == 3 and all(abs(step["zero"]) < 1e-6 for step in alone)
