"""A run with a judge of another tokenizer, killed or stopped and resumed under another placement, is the run that was
not interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import compile_program
from tests.samples import thorough_between
from tests.texts.programs import SELF_REWARDING, folder, text

PLACES = {
    "one": "place * on mesh(0:1)",
    "two": "place actor.* on mesh(0:2) dp=2\nplace judge.* on mesh(0:2) tp=2",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = folder(tmp_path_factory.mktemp("resumed"))
    (base / "p.rlf").write_text(text("  checkpoint every 1 keep=9\n" + SELF_REWARDING, steps=4))
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
@pytest.mark.parametrize("after", thorough_between([1, 2, 3]))
def test_a_run_that_was_stopped(base: Path, whole: Path, after: int) -> None:
    out = base / f"stopped{after}"
    assert set(run(plan(base, "one"), out, stop_after=after)) == {""}
    assert [line["step"] for line in lines(out)] == list(range(1, after + 1))
    checkpoint = out / "checkpoints" / f"step-{after:06}"
    assert set(run(plan(base, "one"), out, resume=checkpoint)) == {""}
    assert lines(out) == lines(whole)
    mine, theirs = (held(x / "checkpoints/step-000004") for x in (out, whole))
    assert mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in mine)


@pytest.mark.thorough
def test_under_another_placement(base: Path, whole: Path) -> None:
    out = base / "moved"
    assert set(run(plan(base, "one"), out, stop_after=2)) == {""}
    assert set(run(plan(base, "two"), out, resume=out / "checkpoints/step-000002", like=whole)) == {""}
    for mine, theirs in zip(lines(out), lines(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-5)
