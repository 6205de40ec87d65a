"""Picks, pairs and their named values give the same numbers wherever the calls run."""

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
BODY = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=6)
  r      = parity(gen)
  scored = gen with reward=r, x=spread(gen), old=gen.logprobs, hard=mean(r by prompt)
  some   = scored where r < 1 or scored.x > 0.2
  best   = pick(some, some.reward)
  kept   = best where best.reward > 0
  tail   = actor.generate(kept, n=2, max_new_tokens=2)
  worst  = pick(some, -some.reward)
  duel   = pair(best, worst)
  wide   = duel where duel.chosen.x - duel.rejected.x < 0.4
  metric some    = count(some)
  metric tail    = mean(mean(spread(tail) by prompt) + kept.reward)
  metric best    = mean(best.reward) + mean(best.hard) + mean(best.old - best.logprobs)
  metric again   = mean(abs(parity(best) + spread(best) - best.reward - best.x))
  metric duels   = count(duel)
  metric wide    = count(wide)
  metric reward  = mean(wide.chosen.x - wide.rejected.x) + mean(wide.rejected.hard)
  metric old     = mean(duel.chosen.old) + mean(len(duel.rejected))
  actor.train(wide.chosen, wide.rejected, loss=lead(a=wide.chosen.old, b=wide.rejected.old), minibatch=2 pairs)
  actor.train(best, loss=pg(adv=best.reward, weight=1.0), minibatches=2)
"""
LEAD = """
loss lead(chosen: token, rejected: token; a: token, b: token) {
  return -mean(logsigmoid(sum(chosen - a by seq) - sum(rejected - b by seq)))
}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("derive"))


@pytest.mark.thorough
def test_placements_agree(base: Path) -> None:
    first, *others = under(base, BODY, list(PLACES.values()), top=LEAD, steps=2, batch=6)
    assert all(0 < step["wide"] <= step["duels"] and step["again"] < 1e-6 for step in first)
    assert any(step["wide"] < step["duels"] for step in first) and any(step["duels"] < 6 for step in first)
    for other in others:
        close(other, first)


SIBLINGS = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=3)
  more   = actor.generate(gen, n=2, max_new_tokens=3)
  scored = more with x=spread(more)
  best   = pick(scored, scored.x)
  top    = pick(best, best.x)
  rival  = others(best)
  duel   = pair(pick(rival, rival.x), pick(rival, -rival.x))
  some   = gen where spread(gen) > 0.45
  left   = others(some)
  kept   = sum(0 * parity(some) + 1 by prompt)
  metric best  = mean(best.x) + mean(parity(rival))
  metric same  = mean(abs(top.x - max(best.x by prompt)))
  metric rank  = mean(sum(rival.x > best.x by prompt))
  metric duels = count(duel)
  metric left  = count(left)
  metric pairs = sum(kept * (kept - 1))
  metric text  = mean(abs(spread(left) - mean(spread(left) by prompt)))
  actor.train(duel.chosen, duel.rejected, loss=lead(a=duel.chosen.logprobs, b=duel.rejected.logprobs))
"""


def test_picks_of_picks_and_all_pairs(base: Path) -> None:
    """Rows that are made of whole prompts, wherever their sources were divided by something finer."""
    first, *others = under(base, SIBLINGS, [PLACES[x] for x in ("one rank", "dp", "tp and pp", "apart")], top=LEAD,
                           steps=1, batch=3)
    for step in first:
        assert step["same"] == 0 and step["duels"] == 9 and step["left"] == step["pairs"]
        assert step["rank"] == 1, "of three different numbers the ranks are 0, 1 and 2"
    assert 0 < first[0]["left"] < 18
    for other in others:
        close(other, first)


COLLECTED = """
  repeat {
    more   = prompts.next()
    tries  = actor.generate(more, n=4, max_new_tokens=6)
    r      = parity(tries)
    scored = tries with reward=r + 0.1 * spread(tries)
    rival  = others(scored)
    beaten = sum(rival.reward > scored.reward by prompt)
    duel   = pair(pick(scored, scored.reward), pick(scored, -scored.reward))
    clear  = duel where duel.chosen.reward > 0.5
  } until count(clear) >= 5 max 3
  metric clear  = count(clear)
  metric rank   = mean(beaten)
  metric rivals = count(rival) / count(tries)
  metric reward = mean(clear.chosen.reward) - mean(clear.rejected.reward)
  final = pick(tries, r)
  metric final = mean(len(final)) + mean(over(r, tries))
  actor.train(clear.chosen, clear.rejected, loss=margin(), minibatches=2)
"""


@pytest.mark.thorough
def test_pairs_are_collected(base: Path) -> None:
    body = COLLECTED.replace(" + mean(over(r, tries))", "")
    first, *others = under(base, body, [PLACES["one rank"], PLACES["tp and pp"], PLACES["apart"]], steps=2, batch=3)
    assert all(step["clear"] >= 2 and step["rivals"] == 3 and step["rank"] <= 1.5 for step in first)
    for other in others:
        close(other, first)
