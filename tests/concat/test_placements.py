"""Rows of several batches in one give the same numbers wherever the calls run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection.programs import folder, under
from tests.selection.test_selection import close

PLACES = {
    "one rank": "place *.* on mesh(0:1)",
    "dp": "place *.* on mesh(0:4) dp=4",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place actor.* on mesh(0:2) pp=2 mbs=1",
    "tp and pp": "place actor.generate on mesh(0:4) dp=2 tp=2\nplace actor.train on mesh(0:4) dp=2 pp=2",
    "apart": "place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:4) dp=2 zero=2",
    "cp": "place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(0:4) dp=2 cp=2",
}
TOP = "buffer good = rows(capacity=9)\nbuffer both = rows(capacity=11)"
# fresh and replayed rows; rows of two batches with the same prompts, of which one is a selection; rows of other prompts
BODY = """
  old    = good.sample(5)
  past   = both.sample(3, weight=both.x)
  prompt = prompts.next()
  second = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=6)
  again  = actor.generate(prompt, n=2, max_new_tokens=4)
  other  = actor.generate(second, n=3, max_new_tokens=5)
  r      = parity(gen)
  scored = gen with x=r, adv=(r - mean(r by prompt)) * gen.logprobs, hard=mean(r by prompt), fresh=1
  kept   = scored where scored.x > 0
  good.add(kept)
  mix    = concat(kept, old)
  metric mix     = count(mix)
  metric x       = mean(mix.x)
  metric adv     = sum(mix.adv)
  metric fresh   = mean(mix.fresh * mix.hard)
  metric now     = mean(actor.logprobs(mix) - mix.logprobs)

  less   = again where len(again) > 3
  one    = gen with y=spread(gen)
  two    = less with y=spread(less)
  tried  = concat(one, two)
  metric tried   = count(tried) - count(less)
  metric best    = mean(max(tried.y by prompt) + 0 * mean(r by prompt))
  metric python  = mean(spread(tried) - tried.y)
  top    = pick(tried, tried.y)
  metric top     = mean(top.y)

  apart  = concat(gen, other)
  metric apart   = mean(max(len(apart) by prompt))
  metric spread  = mean(std(sum(apart.logprobs by seq) by prompt))
  short  = apart where len(apart) < max(len(apart) by prompt)
  few    = short with x=len(short) / 6
  all    = concat(mix, few)
  both.add(all)
  metric all     = count(all)
  metric all_x   = mean(all.x)
  metric past    = mean(past.x)
  tail   = actor.generate(short, n=2, max_new_tokens=2)
  metric tail    = mean(mean(len(tail) by prompt) + len(short))
  actor.train(mix, loss=pg(adv=mix.x - 0.3, weight=1.0), minibatches=2)
  actor.train(all, loss=pg(adv=all.x, weight=0.5), minibatches=3, epochs=2)
  actor.train(tried, loss=nll(), minibatches=2)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("concat"))


@pytest.mark.thorough
def test_placements_agree(base: Path) -> None:
    first, *others = under(base, BODY, list(PLACES.values()), top=TOP, steps=2, batch=4)
    assert first[0]["mix"] < first[1]["mix"] and first[1]["past"] > 0
    assert all(abs(step["python"]) < 1e-6 and step["tried"] == 12 for step in first)
    for other in others:
        close(other, first)


COLLECTED = """
  repeat {
    more  = prompts.next()
    side  = prompts.next()
    tries = actor.generate(more, n=3, max_new_tokens=6)
    again = actor.generate(more, n=2, max_new_tokens=4)
    other = actor.generate(side, n=3, max_new_tokens=5)
    few   = tries where parity(tries) > 0
    one   = concat(few, again)
    two   = concat(few, other)
    good  = one where len(one) > 2
  } until count(good) >= 9 max 3
  metric good  = count(good)
  metric one   = mean(max(len(one) by prompt)) + mean(spread(good))
  metric two   = mean(max(sum(two.logprobs by seq) by prompt)) + count(two)
  late = concat(good, two)
  metric late  = sum(len(late)) - sum(len(good)) - sum(len(two))
  actor.train(late, loss=nll(), minibatches=3)
  every 2 {
    eval answers {
      row  = answers.next()
      base = actor.logprobs(row)
      half = row where len(row) > 2
      both = concat(row, half)
      metric eval_both = count(both) - count(row)
      metric eval_mean = mean(actor.logprobs(both)) - mean(base)
    }
  }
"""


@pytest.mark.thorough
def test_rows_are_collected(base: Path) -> None:
    first, *others = under(base, COLLECTED, [PLACES[x] for x in ("one rank", "tp and pp", "apart")], steps=2, batch=3)
    assert all(step["late"] == 0 and step["good"] > 0 for step in first)
    assert 0 < first[1]["eval_both"] < 36
    for other in others:
        close(other, first)
