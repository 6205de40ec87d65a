"""With `invariant=true`, tokens, log-probs, and all that is made of them are the same under every placement, bit for
bit: rows drawn from a replay buffer by numbers made of log-probs, continuations of these, of responses and of prefixes,
and prompts drawn by a state of rows. Nothing is trained: gradients are equal within rounding only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.buffers.kills import HEAD, checkpoints, lines, seen, start
from tests.end_to_end.programs import compile_program
from tests.papers.matrix import joined
from tests.papers.programs import RECORDER
from tests.samples import thorough_between
from tests.selection.programs import HERE, folder

STEPS = 3
PLACES = {
    "one": "place *.* on mesh(0:1)",
    "dp": "place *.* on mesh(0:2) dp=2",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place *.* on mesh(0:2) pp=2 mbs=2",
    "mixed": "place *.* on mesh(0:4) dp=2 pp=2\nplace fixed.generate on mesh(0:4) dp=2 tp=2 reuse=true",
    "apart": "place *.* on mesh(2:4) tp=2\nplace @gen on mesh(0:1)\nplace @tail on mesh(1:4) dp=3\n"
             "place @more on mesh(0:2) pp=2",
}
TOP = """
model fixed = causal_lm("model", invariant=true)
buffer good = rows(capacity=12)
state rate of prompts = 0.5
"""
BODY = """
  checkpoint every 1 keep=9
  old    = good.sample(5, weight=good.value)
  prompt = prompts.next(weight=1.5 - prompts.rate)
  gen    = fixed.generate(prompt, n=3, max_new_tokens=4)
  more   = fixed.generate(gen, n=2, max_new_tokens=3)
  tail   = fixed.generate(prefixes(gen, every=3, most=2), n=2, max_new_tokens=3, temperature=0.7)
  again  = fixed.generate(old, max_new_tokens=3)
  now    = fixed.logprobs(old)
  v      = mean(mean(fixed.logprobs(more) by seq) by prompt) + 0.1 * mean(mean(tail.logprobs by seq) by gen)
  prompt.rate = 0.5 * prompt.rate + 0.5 * exp(mean(v by prompt))
  kept   = gen with value=exp(v) where spread(gen) > 0.2
  good.add(kept)
  metric gap   = max(max(abs(now - old.logprobs) by seq))
  metric v     = mean(v) + mean(spread(tail)) + mean(len(again))
  metric sure  = mean(again.logprobs) + mean(old.value)
  metric rate  = mean(prompt.rate)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run under each placement; none follows the responses of another."""
    base = folder(tmp_path_factory.mktemp("invariant"))
    (base / "noted.py").write_text((HERE / "rewards_sel.py").read_text() + RECORDER)
    head = "\n".join(line for line in HEAD.format(rewards="noted.py", batch=3).splitlines()
                     if not line.startswith(("data answers", "data pairs", "model "))).replace(", shuffle=false", "")
    (base / "p.rlf").write_text(f"{head}\n{TOP}\nflow f(steps={STEPS}, seed=3) {{\n{BODY}\n}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(base)
        plans = {name: compile_program(base / "p.rlf", {}, place, base) for name, place in PLACES.items()}
    for name, plan in plans.items():
        start(plan, base, name)
    return base


@pytest.mark.thorough
@pytest.mark.many
@pytest.mark.parametrize("place", thorough_between([name for name in PLACES if name != "one"]))
def test_every_placement_has_the_same_bits(base: Path, place: str) -> None:
    assert lines(base / place) == lines(base / "one")
    assert seen(base, place) == seen(base, "one")
    for step, (mine, theirs) in enumerate(zip(checkpoints(base, place, STEPS).values(),
                                              checkpoints(base, "one", STEPS).values(), strict=True), 1):
        rows, others = joined(mine), joined(theirs)
        assert rows.keys() == others.keys() and len(rows) >= 6
        assert [key for key, t in rows.items() if not torch.equal(t, others[key])] == [], step


@pytest.mark.thorough
def test_there_is_something_to_compare(base: Path) -> None:
    """Rows are drawn and have left, and their log-probs are those that generation gave them, with no difference."""
    found = lines(base / "one")
    assert all(step["gap"] == 0 for step in found[1:]) and len({step["v"] for step in found}) == STEPS
    assert int(joined(checkpoints(base, "one", STEPS)[STEPS])["rows of buffer|good|number of rows added"]) > 12
