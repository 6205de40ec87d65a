"""What is made from a selection, from a selection of what continues sequences, and from sequences that a `repeat until`
collected: texts about them, whole chains, prefixes and reductions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.selection.programs import folder, under
from tests.selection.test_selection import close

REWARDS = Path(__file__).parent / "rewards_sel.py"
TOP = f'use py "{REWARDS}" (ask: gen -> prompts(max_tokens=80), ask_some: gen -> prompts?(max_tokens=80))'
PLACES = ["place *.* on mesh(0:1)", "place *.* on mesh(0:3) dp=3",
          "place actor.generate on mesh(0:2) tp=2\nplace actor.train on mesh(2:4) dp=2"]
SELECTED = """
  prompt = prompts.next()
  gen  = actor.generate(prompt, n=3, max_new_tokens=5)
  r    = spread(gen)
  kept = gen where r > 0.4
  all  = actor.generate(ask(gen), max_new_tokens=3, greedy=true)
  some = actor.generate(ask(kept), max_new_tokens=3, greedy=true)
  few  = actor.generate(ask_some(kept), max_new_tokens=3, greedy=true)
  mark = sum(spread(some) by prompt)
  high = kept where mark > 0.3
  metric text  = sum(abs(mark - over(sum(spread(all) by prompt), kept)))
  metric back  = mean(over(mark, gen, -1) * r)
  metric few   = sum(sum(spread(few) by prompt) + over(r, kept)) + count(few)
  metric high  = mean(over(mark, high)) + count(high)
  more = actor.generate(gen, n=2, max_new_tokens=4)
  m    = spread(more)
  good = more where m > 0.5
  own  = over(m, good)
  full = whole(good)
  metric whole = sum(abs(len(full) - over(len(whole(more)), good)))
  metric found = mean(mean(own by prompt)) - sum(mean(own by gen)) / sum(count(own by gen) > 0)
  metric norm  = mean((own - mean(own by prompt)) * len(full))
  actor.train(full, loss=pg(adv=own, weight=own - min(own by prompt)), minibatches=2)
"""
COLLECTED = """
  repeat {
    prompt = prompts.next()
    gen    = actor.generate(prompt, n=2, max_new_tokens=6)
    inside = prefixes(gen, every=2)
    late   = inside where inside.at > 1
    v      = parity(gen) + inside.at
    told   = actor.generate(ask(gen), max_new_tokens=3, greedy=true)
    t      = spread(told)
  } until sum(parity(gen)) > 5 max 3
  cuts  = prefixes(gen, every=2)
  tail  = actor.generate(cuts, max_new_tokens=2)
  rival = others(gen)
  after = actor.generate(ask(gen), max_new_tokens=3, greedy=true)
  metric cuts  = abs(count(cuts) - count(inside))
  metric at    = mean(cuts.at) - mean(inside.at) + mean(late.at - v) + mean(over(parity(gen), late))
  metric token = mean(along(v, gen) - along(parity(gen) + cuts.at, gen))
  metric texts = mean(spread(after)) - mean(t)
  metric rival = count(rival) / count(gen) - mean(len(rival)) / mean(len(gen))
  metric along = mean(along(mean(spread(tail) by prompt), gen))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("chains"))


@pytest.mark.thorough
def test_what_is_made_from_selections(base: Path) -> None:
    first, *others = under(base, SELECTED, PLACES, top=TOP, steps=2)
    for step in first:
        assert step["text"] < 1e-5 and step["whole"] == 0 and abs(step["found"]) < 1e-6
        assert step["norm"] != 0 and step["few"] > 1
    for other in others:
        close(other, first)


def test_what_is_made_from_collected_sequences(base: Path) -> None:
    first, *others = under(base, COLLECTED, PLACES[:2], top=TOP, steps=2)
    for step in first:
        assert step["cuts"] == 0 and all(abs(step[k]) < 1e-6 for k in ("at", "token", "texts", "rival"))
        assert step["along"] > 0
    for other in others:
        close(other, first)
