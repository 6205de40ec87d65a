"""A run with a buffer and pairs, stopped after every step and resumed, also under another placement and number of
ranks, is the run that was not interrupted; a checkpoint whose rows are damaged is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import numpy as np
import torch

from rldsl.plan.model import ReplayBuffer, StoredField
from rldsl.runtime.state.replay import COUNT, LENGTHS, TEMPERATURE, OtherRows, ReplayRows, join_parts
from rldsl.runtime.store import RaggedRows
from rldsl.runtime.weighted_sample import sample_by_weight
from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import compile_program
from tests.selection.programs import HEAD, HERE, folder

PLACES = {
    "one": "place *.* on mesh(0:1)",
    "two": "place @gen on mesh(0:2) dp=2\nplace @now on mesh(0:2) tp=2\nplace actor.train on mesh(0:2) pp=2",
}
BODY = """
  checkpoint every 1 keep=9
  old    = good.sample(4, weight=good.value)
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=3, max_new_tokens=4)
  scored = gen with value=0.01 + uniform(parity(gen)), was=gen.logprobs
  kept   = scored where scored.value > 0.4
  good.add(kept)
  duel   = pair(pick(scored, scored.value), pick(scored, -scored.value))
  now    = actor.logprobs(old)
  actor.train(duel.chosen, duel.rejected, loss=margin())
  actor.train(old, loss=pg(adv=old.value, weight=1.0), minibatches=2)
  metric drawn = sum(old.value)
  metric moved = mean(now - old.was)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = folder(tmp_path_factory.mktemp("resumed"))
    head = "\n".join(line for line in HEAD.format(rewards=HERE / "rewards_sel.py", batch=3).splitlines()
                     if not line.startswith(("data answers", "data pairs")))
    (base / "p.rlf").write_text(f"{head}\nbuffer good = rows(capacity=8)\nflow f(steps=4) {{\n{BODY}\n}}\n")
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


@pytest.mark.parametrize("after", [2])  # killed in every step: test_killed.py
def test_a_run_that_was_stopped(base: Path, whole: Path, after: int) -> None:
    out = base / f"stopped{after}"
    assert set(run(plan(base, "one"), out, stop_after=after)) == {""}
    assert set(run(plan(base, "one"), out, resume=out / f"checkpoints/step-{after:06}")) == {""}
    assert lines(out) == lines(whole)
    mine, theirs = (held(x / "checkpoints/step-000004") for x in (out, whole))
    assert mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in mine)


def test_under_another_placement(base: Path, whole: Path) -> None:
    out = base / "moved"
    assert set(run(plan(base, "two"), out, stop_after=2, like=whole)) == {""}
    assert set(run(plan(base, "one"), out, resume=out / "checkpoints/step-000002", like=whole)) == {""}
    for mine, theirs in zip(lines(out), lines(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
    assert all(line["drawn"] > 0 for line in lines(whole)[1:])


@pytest.mark.parametrize("old, new", [
    ("max_new_tokens=4", "max_new_tokens=3"),
    ("max_new_tokens=4", "max_new_tokens=4, temperature=0.7"),
    ("value=0.01", "more=1, value=0.01"),
])
def test_a_program_that_keeps_other_rows(base: Path, whole: Path, old: str, new: str) -> None:
    (base / "other.rlf").write_text((base / "p.rlf").read_text().replace(old, new))
    other = compile_program(base / "other.rlf", {}, PLACES["one"], base / "plans")
    assert set(run(other, base / "other", resume=whole / "checkpoints/step-000002")) == {"RL0762"}


# ------------------------------------------------------------------------------------------------ the rows alone

FIELDS = (StoredField("tokens", "tokens", "i64"), StoredField("logprobs", "response", "f32"),
          StoredField("x", "row", "f32"))


def buffer(capacity: int) -> ReplayRows:
    return ReplayRows(ReplayBuffer("good", "s", capacity, FIELDS, "d", 9, 9))


def ragged(sizes: list[int], dtype: torch.dtype, start: int) -> RaggedRows:
    data = torch.arange(start, start + sum(sizes)).to(dtype)
    return RaggedRows(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64), data)


def fill(rows: ReplayRows, lengths: list[tuple[int, int]], start: int) -> None:
    prompt, response = [p for p, _ in lengths], [r for _, r in lengths]
    rows.add(prompt, response, {"tokens": ragged([p + r for p, r in lengths], torch.int64, start),
                                "logprobs": ragged(response, torch.float32, start),
                                "x": ragged([1] * len(lengths), torch.float32, start)})


def state(rows: ReplayRows) -> tuple[int, list[tuple[int, int, dict[str, list[float]]]]]:
    return rows.added, [(r.prompt, r.response, {k: v.tolist() for k, v in r.values.items()}) for r in rows.rows]


def wholes(rows: ReplayRows, world: int) -> dict[str, torch.Tensor]:
    pieces: dict[str, list[tuple[tuple[int, int], torch.Tensor]]] = {}
    for rank in reversed(range(world)):
        for key, tensor in rows.share(rank, world).items():
            _, _, field, box = key.split("|")
            first = box.split(",")[0].split(":")
            pieces.setdefault(field, []).append(((int(first[0]), int(first[1])), tensor))
    return {field: join_parts(parts) for field, parts in pieces.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shares_make_the_whole(world: int) -> None:
    """Rows without a response, and fewer rows than ranks, too; of more rows than the capacity the newest."""
    rows = buffer(5)
    assert wholes(rows, world).keys() == {COUNT, TEMPERATURE}
    fill(rows, [(2, 3), (1, 0), (4, 2)], 10)
    fill(rows, [(1, 1), (2, 0), (3, 5), (1, 2)], 50)
    again, smaller = buffer(5), buffer(2)
    again.restore(wholes(rows, world))
    assert state(again) == state(rows) and rows.added == 7 and len(rows.rows) == 5
    smaller.restore(wholes(rows, world))
    assert state(smaller) == (7, state(rows)[1][-2:])
    empty = buffer(5)
    empty.restore(wholes(buffer(5), world))
    assert state(empty) == (0, [])


@pytest.mark.parametrize("damage", [
    lambda w: w.pop(COUNT),
    lambda w: w[COUNT].zero_(),
    lambda w: w[LENGTHS].neg_(),
    lambda w: w.update({LENGTHS: w[LENGTHS].float()}),
    lambda w: w[LENGTHS].mul_(100),
    lambda w: w.update({"tokens": w["tokens"][1:]}),
    lambda w: w.update({"x": w["x"].double()}),
    lambda w: w.pop("tokens"),
    lambda w: w.update({TEMPERATURE: torch.ones(2)}),
])
def test_damage_is_seen(damage) -> None:
    rows = buffer(5)
    fill(rows, [(2, 3), (1, 1)], 10)
    found = wholes(rows, 2)
    damage(found)
    with pytest.raises((ValueError, KeyError)):
        buffer(5).restore(found)


@pytest.mark.parametrize("most, temperature, why", [
    ((1, 9), 1.0, "a prompt has 2 tokens, and the program allows 1"),
    ((9, 2), 1.0, "a response has 3 tokens, and the program allows 2"),
    ((9, 9), 0.7, "at the temperature 1, those of the program at 0.7"),
])
def test_rows_of_another_kind_are_seen(most: tuple[int, int], temperature: float, why: str) -> None:
    """They are no damage: the program has changed. A buffer without rows fits every program."""
    now = ReplayBuffer("good", "s", 5, FIELDS, "d", *most, temperature)
    ReplayRows(now).restore(wholes(buffer(5), 2))
    rows = buffer(5)
    fill(rows, [(2, 3), (1, 1)], 10)
    with pytest.raises(OtherRows, match=why):
        ReplayRows(now).restore(wholes(rows, 2))
    earlier = wholes(rows, 2)
    del earlier[TEMPERATURE]  # of a version that did not write it
    buffer(5).restore(earlier)


def test_missing_parts_are_seen() -> None:
    for parts in ([((1, 2), torch.ones(1))], [((0, 2), torch.ones(2)), ((1, 3), torch.ones(2))]):
        with pytest.raises(ValueError, match="missing or overlap"):
            join_parts(parts)


# ------------------------------------------------------------------------------------------------ against a model

def test_against_lists() -> None:
    """Add and draw against a list in plain Python: the oldest leave, and rows are drawn by their numbers."""
    draws = torch.Generator().manual_seed(1)
    rows, model, number = buffer(7), [], 0
    for step in range(60):
        count = int(torch.randint(0, 5, (1,), generator=draws))
        lengths = [(int(p), int(r)) for p, r in torch.randint(0, 4, (count, 2), generator=draws)]
        fill(rows, lengths, number)
        start = number
        for i, (p, r) in enumerate(lengths):
            at = start + sum(a + b for a, b in lengths[:i])
            model.append((number, p, r, list(range(at, at + p + r)), float(start + i)))
            number += 1
        model = model[-7:]
        assert [(r.prompt, r.response, r.values["tokens"].tolist(), r.values["x"].item()) for r in rows.rows] == [
            m[1:] for m in model]
        numbers = np.array([m[0] for m in model], np.int64)
        at = sorted(sample_by_weight(np.ones(len(model)), 3, 5, step, numbers).tolist())
        drawn = rows.draw(3, np.ones(len(model)), 5, step)
        assert [r.values["x"].item() for r in drawn] == [model[i][4] for i in at]
