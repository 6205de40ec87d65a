"""A run with continuations, all pairs of a prompt and pairs of two picks, stopped and resumed, is the run that was not
interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import compile_program
from tests.selection.programs import HEAD, HERE, folder

PLACES = {
    "one": "place *.* on mesh(0:1)",
    "two": "place @gen on mesh(0:2) dp=2\nplace @more on mesh(0:2) tp=2\nplace actor.train on mesh(0:2) pp=2",
}
BODY = """
  checkpoint every 1 keep=9
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=4)
  more   = actor.generate(gen, n=2, max_new_tokens=3)
  v      = mean(spread(more) by prompt)
  scored = gen with value=v + 0.01 * uniform(v)
  rival  = others(scored)
  beaten = sum(rival.value > scored.value by prompt)
  duel   = pair(pick(scored, scored.value), pick(scored, -scored.value))
  best   = lowest(best, mean(v))
  actor.train(more, loss=pg(adv=beaten, weight=1.0), minibatches=2)
  actor.train(duel.chosen, duel.rejected, loss=margin())
  metric best  = best
  metric rank  = mean(beaten * v)
  metric gap   = mean(duel.chosen.value - duel.rejected.value)
"""
TOP = """
state best = 9
fn lowest(best, now) -> batch {
  return min(best, now)
}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = folder(tmp_path_factory.mktemp("resumed"))
    head = "\n".join(line for line in HEAD.format(rewards=HERE / "rewards_sel.py", batch=3).splitlines()
                     if not line.startswith(("data answers", "data pairs")))
    (base / "p.rlf").write_text(f"{head}\n{TOP}\nflow f(steps=3) {{\n{BODY}\n}}\n")
    before = os.getcwd()
    os.chdir(base)
    yield base
    os.chdir(before)


def plan(base: Path, place: str) -> bytes:
    folder = base / "plans" / place
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(base / "p.rlf", {}, PLACES[place], folder)


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    assert set(run(plan(base, "one"), base / "whole")) == {""}
    return base / "whole"


@pytest.mark.thorough
@pytest.mark.parametrize("after", [1, 2])
def test_a_run_that_was_stopped(base: Path, whole: Path, after: int) -> None:
    out = base / f"stopped{after}"
    assert set(run(plan(base, "one"), out, stop_after=after)) == {""}
    assert [line["step"] for line in lines(out)] == list(range(1, after + 1))
    assert set(run(plan(base, "one"), out, resume=out / f"checkpoints/step-{after:06}")) == {""}
    assert lines(out) == lines(whole)
    mine, theirs = (held(x / "checkpoints/step-000003") for x in (out, whole))
    assert mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in mine)


def test_under_another_placement(base: Path, whole: Path) -> None:
    out = base / "moved"
    assert set(run(plan(base, "one"), out, stop_after=1)) == {""}
    assert set(run(plan(base, "two"), out, resume=out / "checkpoints/step-000001", like=whole)) == {""}
    for mine, theirs in zip(lines(out), lines(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    assert lines(whole)[0]["rank"] != lines(whole)[2]["rank"]
