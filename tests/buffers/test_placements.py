"""Buffers give the same numbers wherever the calls run, and are what a model of them in plain Python says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.derive.test_placements import PLACES
from tests.selection.programs import folder, under
from tests.selection.test_selection import close

BUFFERS = "buffer good = rows(capacity=9)\nbuffer late = rows(capacity=40)\nstate heat = 2"
BODY = """
  old    = good.sample(6, weight=good.spread ** heat)
  heat   = 0.9 * heat
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=6)
  r      = parity(gen)
  scored = gen with reward=r, spread=1 + abs(spread(gen)), was=gen.logprobs
  kept   = scored where r > 0
  good.add(kept)
  again  = good.sample(9)
  late.add(again)
  some   = again where again.reward > 0
  now    = actor.logprobs(some)
  metric old    = count(old)
  metric again  = count(again)
  metric reward = mean(old.reward) + mean(again.spread)
  metric same   = mean(abs(again.was - again.logprobs))
  metric moved  = mean(now - some.logprobs)
  metric length = mean(len(again)) + sum(again.spread)
  more   = late.sample(9)
  metric late   = sum(more.spread)
  few    = late.sample(4, weight=where(late.spread > 1.2 and late.finished or late.spread > 1.3, 1 / late.spread, 0))
  metric few    = count(few)
  metric least  = min(few.spread) + where(count(few) == 0, 9, 0)
  actor.train(some, loss=pg(adv=some.reward, weight=1.0), minibatches=2)
  actor.train(old, loss=pg(adv=old.reward, weight=0.5))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("buffers"))


@pytest.mark.thorough
def test_placements_agree(base: Path) -> None:
    first, *others = under(base, BODY, list(PLACES.values()), top=BUFFERS, steps=4, batch=4)
    assert first[0]["old"] == 0 and all(step["old"] == 6 for step in first[3:]) and first[-1]["again"] == 9
    assert all(step["same"] == 0 for step in first) and any(step["moved"] for step in first)
    assert any(step["few"] > 0 for step in first) and all(step["least"] > 1.2 for step in first)
    for other in others:
        close(other, first)
