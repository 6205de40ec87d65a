"""Runs whose rows are drawn by states of these rows: against a straight-line model, under several placements, and
resumed after every step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch

from rldsl.runtime.draws import uniform
from rldsl.sharding.partition import key_of, mix
from tests.checkpoint.runs import held, lines, run
from tests.curriculum.programs import HEAD, ROWS, compiled, folder
from tests.samples import thorough_between

PLACES = {
    "one rank": "place *.* on mesh(0:1)",
    "dp": "place *.* on mesh(0:4) dp=4",
    "tp": "place *.* on mesh(0:2) tp=2",
    "pp": "place actor.* on mesh(0:2) pp=2 mbs=1",
    "tp and pp": "place actor.generate on mesh(0:4) dp=2 tp=2\nplace actor.train on mesh(0:4) dp=2 pp=2",
    "apart": "place actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:4) dp=2 zero=2",
    "idle ranks": "place *.* on mesh(1:3) dp=2",
    "elsewhere": 'place *.* on mesh(0:2) dp=2\nplace @"new prompt.rate" on mesh(2:3)\nplace @r on mesh(3:4)',
}
STEPS = 5


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("curriculum"))


def ran(base: Path, name: str, place: str, *, resume: Path | None = None, like: Path | None = None,
        body: str | None = None) -> Path:
    """Where a run has written its files."""
    plan = compiled(base, place=place, steps=STEPS) if body is None else compiled(base, body, place, steps=STEPS)
    with chdir(base):
        assert set(run(plan, base / name, resume=resume, like=like)) == {""}
    return base / name


def states(out: Path, step: int) -> dict[str, torch.Tensor]:
    """The states of rows in a checkpoint."""
    found = held(out / f"checkpoints/step-{step:06d}")
    return {key: t for key, t in found.items() if key.startswith("prompts.")}


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    """An undisturbed run on one rank."""
    (base / "drawn.jsonl").unlink(missing_ok=True)
    out = ran(base, "whole", PLACES["one rank"])
    (base / "drawn.jsonl").rename(base / "whole.jsonl")
    return out


def drawn_by_hand(weights: Sequence[float], step: int, count: int = 4) -> list[int]:
    """The rows with the largest log(u) / weight."""
    seed = mix(3, key_of("prompt"), 0) >> 1
    u = uniform(seed, step, torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)).tolist()
    return sorted(range(ROWS), key=lambda i: -float(np.log(u[i])) / weights[i])[:count]


def test_a_straight_line_model_of_states_and_draws(base: Path, whole: Path) -> None:
    rate, seen, heat, expected = torch.full((ROWS,), 0.5), torch.zeros(ROWS), 2.0, []
    number = torch.arange(ROWS, dtype=torch.float32)
    for step in range(STEPS):
        weights = torch.exp(-rate / torch.tensor(heat, dtype=torch.float32)) * (1 + number)
        rows = drawn_by_hand(weights.tolist(), step)
        before, r = rate[rows], number[rows] / 32
        rate[rows] = 0.5 * before + r
        often = [row for row, old in zip(rows, before.tolist(), strict=True) if rate[row] > old]
        seen[often] += 1
        heat *= 0.9
        expected.append(rows)
        line, found = lines(whole)[step], states(whole, step + 1)
        assert line["gain"] == pytest.approx(float((rate[rows] - before).mean()), abs=1e-6)
        assert line["seen"] == float(seen[rows].sum()) and line["numbers"] == sum(rows)
        assert torch.equal(found[f"prompts.rate|state|rows|0:{ROWS}"], rate)
        assert torch.equal(found[f"prompts.seen|state|rows|0:{ROWS}"], seen)
    said = [json.loads(line)[::2] for line in (base / "whole.jsonl").read_text().splitlines()]
    assert said == expected and all(len(set(rows)) == 4 for rows in said)
    assert 0 < int((seen > 0).sum()) < len({row for rows in expected for row in rows})


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between([p for p in PLACES if p != "one rank"]))
def test_placements_draw_the_same_rows_and_keep_the_same_states(base: Path, whole: Path, place: str) -> None:
    out = ran(base, place.replace(" ", "-"), PLACES[place], like=whole)
    for mine, theirs in zip(lines(out), lines(whole), strict=True):
        assert mine["numbers"] == theirs["numbers"] and mine["seen"] == theirs["seen"]
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}
    for step in range(1, STEPS + 1):
        mine_now, theirs_now = states(out, step), states(whole, step)
        assert mine_now.keys() == theirs_now.keys() and len(mine_now) == 2
        assert all(torch.equal(mine_now[k], theirs_now[k]) for k in theirs_now)


COLLECTED = """
  repeat {
    more   = prompts.next(weight=1.5 - prompts.rate)
    tries  = actor.generate(more, n=2, max_new_tokens=4)
    r      = share(tries)
    more.rate = 0.5 * more.rate + mean(r by prompt)
    more.seen = more.seen + 1
    kept   = tries where r > 0.2
  } until count(kept) >= 10 max 3
  more.seen = more.seen + 10
  metric kept = count(kept)
  metric seen = sum(more.seen)
  metric rate = mean(more.rate)
  actor.train(kept, loss=pg(adv=over(r, kept)), minibatches=2)
  every 2 {
    eval heldout {
      row = heldout.next()
      gen = actor.generate(row, greedy=true, max_new_tokens=2)
      metric known = mean(len(gen)) * 0 + mean(row.known)
    }
  }
  checkpoint every 1 keep=9
"""
HELDOUT = """
data heldout = jsonl("prompts.jsonl", batch=6, max_prompt_tokens=16)
state known of heldout = 0.25
"""


@pytest.mark.thorough
def test_collected_batches_write_each_row_and_evaluations_read(base: Path) -> None:
    """After the block, a row that several iterations drew is written once, with the number of the last."""
    outs = []
    for name, place in (("c1", PLACES["one rank"]), ("c4", PLACES["tp and pp"])):
        plan = compiled(base, COLLECTED, place, steps=2, head=HEAD + HELDOUT)
        with chdir(base):
            assert set(run(plan, base / name, like=outs[0] if outs else None)) == {""}
        outs.append(base / name)
    first, second = (lines(out) for out in outs)
    for mine, theirs in zip(second, first, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}
    assert first[1]["known"] == 0.25
    for step in (1, 2):
        mine_now, theirs_now = states(outs[1], step), states(outs[0], step)
        assert len(theirs_now) == 2 and all(torch.equal(mine_now[k], theirs_now[k]) for k in theirs_now)
    seen = states(outs[0], 1)[f"prompts.seen|state|rows|0:{ROWS}"].tolist()
    assert all(x == 0 or 11 <= x <= 13 for x in seen) and sum(x > 0 for x in seen) >= 4
    assert sum(x % 10 for x in seen) % 4 == 0, "each iteration counts its four rows"


@pytest.mark.parametrize(("step", "place"), thorough_between([(1, "one rank"), (2, "apart"), (3, "idle ranks"), (4, "dp")]))
def test_a_run_resumes_after_every_step_with_the_same_draws_and_states(base: Path, whole: Path, step: int,
                                                                       place: str) -> None:
    out = ran(base, f"resumed-{step}", PLACES[place], resume=whole / f"checkpoints/step-{step:06d}",
              like=None if place == "one rank" else whole)
    assert [line["step"] for line in lines(out)] == list(range(step + 1, STEPS + 1))
    for mine, theirs in zip(lines(out), lines(whole)[step:], strict=True):
        assert mine["numbers"] == theirs["numbers"] and mine["seen"] == theirs["seen"]
    mine_now, theirs_now = held(out / f"checkpoints/step-{STEPS:06d}"), held(whole / f"checkpoints/step-{STEPS:06d}")
    same = theirs_now if place == "one rank" else states(whole, STEPS)
    assert all(torch.equal(mine_now[k], theirs_now[k]) for k in same)


@pytest.mark.parametrize("weight", ["prompts.number < 3", "prompts.number - 1", "log(prompts.number - 5)"])
def test_weights_that_give_no_batch_stop_the_run(base: Path, weight: str) -> None:
    body = f"  prompt = prompts.next(weight={weight})\n  metric x = mean(prompt.rate)\n"
    plan = compiled(base, body, None, steps=1)
    with chdir(base):
        assert run(plan, base / "refused", again=True) == ["RL0759"]


def test_states_belong_to_as_many_rows(base: Path, whole: Path, tmp_path: Path) -> None:
    rows = (base / "prompts.jsonl").read_text()
    plan = compiled(base, place=PLACES["one rank"], steps=STEPS)
    (base / "prompts.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    try:
        with chdir(base):
            assert run(plan, tmp_path / "out", resume=whole / "checkpoints/step-000003") == ["RL0764"]
    finally:
        (base / "prompts.jsonl").write_text(rows)
