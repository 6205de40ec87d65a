"""Prefixes, values along tokens, values over siblings, and reductions up to the rows of a batch: what they are, and
that it does not depend on placements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.samples import thorough_between
from tests.selection.programs import folder, numbers, run

PLACES = [
    "place *.* on mesh(0:2) dp=2",
    "place *.* on mesh(0:2) tp=2",
    "place *.* on mesh(0:2) pp=2",
    "place *.* on mesh(0:4) dp=2 pp=2\nplace actor.train on mesh(0:4) dp=4 zero=2",
    "place @gen on mesh(0:2) dp=2\nplace @tail on mesh(2:4) tp=2\nplace actor.train on mesh(0:2) pp=2",
    "place @gen on mesh(0:1)\nplace @tail on mesh(1:4) dp=3\nplace actor.train on mesh(0:4) dp=4 mbs=1",
]
BODY = """
  prompt = prompts.next()
  gen  = actor.generate(prompt, n=3, max_new_tokens=7)
  cuts = prefixes(gen, every=2, most=3)
  half = prefixes(gen, fractions=[0.5])
  tail = actor.generate(cuts, n=2, max_new_tokens=3)
  r    = parity(gen)
  v    = mean(parity(tail) by prompt)
  step = next(v by prompt) + at_end(r, cuts) - v
  adv  = along(step, gen)
  kept = tail where parity(tail) > 0
  good = gen where r > 0
  actor.train(gen, loss=pg(adv=mean(adv by seq), weight=1 + 0 * r), minibatches=2)
  metric cuts   = count(cuts)
  metric at     = mean(cuts.at)
  metric half   = mean(half.at)
  metric adv    = mean(adv)
  metric total  = mean(sum(step by prompt) - r + min(where(cuts.at == 0, v, 9) by prompt))
  metric ends   = mean(last(cumsum(step by prompt) by prompt) - sum(step by gen))
  metric swing  = mean(discount(step by prompt, 0.5) - prev(v by prompt))
  metric up     = mean(mean(parity(tail) by gen) - mean(v by prompt))
  metric root   = mean(mean(sum(parity(tail) by prompt) by prompt))
  metric all    = mean(mean(sum(parity(tail) by cuts) by gen))
  metric kept   = mean(sum(parity(kept) by gen) + r)
  metric back   = mean(over(parity(good), gen, 0 - 1) - where(r > 0, r, 0 - 1))
  metric none   = mean(over(2 * parity(good), gen, 7))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("prefixes"))


@pytest.fixture(scope="module")
def alone(base: Path):
    return run(base, BODY, steps=2)


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_no_placement_changes_a_number(base: Path, alone, place: str) -> None:
    found = numbers(run(base, BODY, steps=2, place=place, like=alone))
    assert len(found) == 2
    for mine, theirs in zip(found, numbers(alone), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


def test_what_must_be_zero_is(alone) -> None:
    """Steps of a value telescope; a reduction by a batch is the same one level at a time; a selection comes back."""
    for step in alone:
        assert {k: step[k] for k in ("total", "ends", "up", "back")} == pytest.approx(
            dict.fromkeys(("total", "ends", "up", "back"), 0.0), abs=1e-5)
        assert step["none"] != 7


NESTED = """
  old    = good.sample(5)
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=6)
  kept   = gen where parity(gen) > 0 or spread(gen) > 0.5
  long   = kept where len(kept) > 3
  wide   = long where spread(long) > 0.3
  more   = actor.generate(wide, n=2, max_new_tokens=2)
  metric one   = mean(abs(over(len(long), kept, 0) - where(len(kept) > 3, len(kept), 0)))
  metric two   = mean(abs(over(spread(wide), long, 7) - where(spread(long) > 0.3, spread(long), 7)))
  metric three = mean(abs(over(len(wide), kept, 9) - where(len(kept) > 3 and spread(kept) > 0.3, len(kept), 9)))
  metric end   = mean(over(mean(len(more) by prompt), kept, 0))
  good.add(kept)
  past   = old where len(old) > 4
  again  = actor.generate(past, n=2, max_new_tokens=2)
  back   = over(mean(len(again) by prompt), old, 5)
  metric past = mean(abs(over(len(past), old, 0) - where(len(old) > 4, len(old), 0)))
  metric back = mean(back + len(old))
  metric kept = count(kept)
  metric long = count(long)
  metric wide = count(wide)
"""


def test_selections_of_selections_and_rows_of_a_buffer_come_back(base: Path) -> None:
    top = "buffer good = rows(capacity=12)"
    first = run(base, NESTED, steps=2, top=top)
    for step in numbers(first):
        assert [step[x] for x in ("one", "two", "three", "past")] == [0] * 4
    kept, long, wide = (sum(step[x] for step in first) for x in ("kept", "long", "wide"))
    assert 12 < kept < 36 and kept > long > wide > 0, "each selection leaves rows out"
    assert numbers(first)[-1]["back"] > 4
    for place in ("place *.* on mesh(0:4) dp=2 pp=2", "place @gen on mesh(0:1)\nplace @more on mesh(1:4) dp=3"):
        found = numbers(run(base, NESTED, steps=2, top=top, place=place, like=first))
        for mine, theirs in zip(found, numbers(first), strict=True):
            assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}
