"""Distillation on given responses: whole distributions are all entries, and a placement changes no number, with teacher
and student under other layouts, and for the most likely tokens on other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.samples import thorough_between
from tests.tiny import make_model

PROGRAM = Path(__file__).parent / "given.rlf"
PLACES = {
    "tp 4": "place *.train on mesh(0:4) tp=4 mbs=2\nplace teacher.distribution on mesh(0:4) tp=4\n"
            "place teacher.top on mesh(0:2) tp=2\nplace teacher.logprobs_at on mesh(2:4) dp=2\n"
            "place mine.top on mesh(0:4) dp=2 tp=2",
    "apart": "place theirs.* on mesh(0:2) tp=2 mbs=1\nplace mine.train on mesh(0:2) dp=2 zero=1\nplace mine.top on mesh(0:2) dp=2\n"
             "place full.* on mesh(0:2) dp=2\nplace teacher.distribution on mesh(0:2) dp=2\n"
             "place all.* on mesh(0:2) pp=2\nplace teacher.top on mesh(2:4) tp=2\n"
             "place teacher.logprobs_at on mesh(2:4) cp=2",
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tiny")
    make_model(root / "m", num_hidden_layers=2)
    make_model(root / "strong", seed=7, num_hidden_layers=2)
    rows = [{"prompt": "1+2+3"[: 1 + 2 * (i % 3)], "answer": "4+5+6"[: 1 + 2 * (i % 3)]} for i in range(12)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"base": str(root / "m"), "strong": str(root / "strong"), "rows": str(root / "rows.jsonl")}


@pytest.fixture(scope="module")
def alone(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return run_program(PROGRAM, sets, tmp_path_factory.mktemp("alone"))


def test_a_whole_distribution_is_all_entries(alone: Metrics) -> None:
    for step in alone:
        for name in ("loss", "grad_norm"):
            assert step[f"full/{name}"] == pytest.approx(step[f"all/{name}"], rel=1e-5)
        assert all(step[f"{model}/loss"] > 1e-3 for model in ("theirs", "mine", "full"))


@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_a_placement_changes_no_number(sets: dict[str, str], alone: Metrics, place: str, tmp_path: Path) -> None:
    there = run_program(PROGRAM, sets, tmp_path, PLACES[place])
    for a, b in zip(alone, there, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-6)
