"""Whole runs: entry values mean what they say, and the placement never changes numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.tiny import make_all

PROGRAM = Path(__file__).parent / "topk.rlf"
ON_FOUR = """
place student.train    on mesh(0:2) dp=2 zero=1 mbs=2
place student.generate on mesh(0:2) dp=2
place student.top      on mesh(2:4) tp=2
place spread.*         on mesh(2:4) cp=2 mbs=1
place teacher.*        on mesh(2:4) pp=2 mbs=1
"""
DIVIDED = """
place student.*        on mesh(0:4) dp=2 tp=2
place student.generate on mesh(0:1)
place spread.*         on mesh(0:4) tp=4 mbs=5
place teacher.*        on mesh(0:4) dp=2 cp=2
"""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tiny")
    make_all(root, num_hidden_layers=2)
    return {"base": str(root / "models/sft"), "rows": str(root / "data/prompts.jsonl")}


WHOLE = Path(__file__).parent / "whole.rlf"
ALIKE = """
place student.train        on mesh(0:4) {degrees} mbs=2
place teacher.distribution on mesh(0:4) {like}
place student.generate     on mesh(0:1)
place other.*              on mesh(2:4) dp=2
"""
OFFLOADED = """
place student.* on mesh(0:2) dp=2 offload=true
place teacher.* on mesh(0:2) dp=2 offload=true
"""


@pytest.fixture(scope="module")
def alone(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return run_program(PROGRAM, sets, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def whole(sets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return run_program(WHOLE, sets | {"strong": sets["base"].replace("sft", "teacher")},
                       tmp_path_factory.mktemp("whole"))


def test_a_whole_distribution_is_all_entries(whole: Metrics) -> None:
    for step in whole:
        for name in ("loss", "grad_norm"):
            for call in ("", "#2"):
                assert step[f"student{call}/{name}"] == pytest.approx(step[f"other{call}/{name}"], rel=1e-5)
                assert step[f"student{call}/{name}"] > 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("place", [
    ALIKE.format(degrees="dp=2 tp=2 zero=1", like="dp=2 tp=2"), ALIKE.format(degrees="tp=4", like="tp=4 mbs=3"),
    ALIKE.format(degrees="pp=2 cp=2 recompute=full", like="pp=2 cp=2"), OFFLOADED])
def test_a_placement_changes_no_number_of_whole_distributions(sets: dict[str, str], whole: Metrics, place: str,
                                                              tmp_path: Path) -> None:
    there = run_program(WHOLE, sets | {"strong": sets["base"].replace("sft", "teacher")}, tmp_path, place, like=whole)
    for a, b in zip(whole, there, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=2e-6)


def test_entries_are_the_distribution(alone: Metrics) -> None:
    first, second = alone
    for step in alone:
        assert max(step[x] for x in ("differ", "total", "entropy", "squares")) < 2e-6
        assert step["best"] <= 1e-6 and 0.2 < step["rest"] < 0.9
    assert first["student/loss"] == pytest.approx(first["spread/loss"], rel=1e-6)
    assert first["student/grad_norm"] == pytest.approx(first["spread/grad_norm"], rel=1e-5)
    assert first["student#2/loss"] > 0 and first["student#3/loss"] != second["student#3/loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("place", [ON_FOUR, DIVIDED])
def test_a_placement_changes_no_number(sets: dict[str, str], alone: Metrics, place: str, tmp_path: Path) -> None:
    there = run_program(PROGRAM, sets, tmp_path, place, like=alone)
    for a, b in zip(alone, there, strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=2e-4, abs=2e-6)
