"""The package math-verify as a reward, and both graders on answers with a known truth."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from benchmarks.math_graders import FAMILIES, cases
from rldsl.stdlib.rewards import math_equal, math_verify

CASES = cases()
ROWS = [{"completion": c.completion, "answer": c.answer} for c in CASES]


def wrong(found: list[float]) -> list[tuple[str, str]]:
    return [(c.family, c.answer) for c, value in zip(CASES, found, strict=True) if (value == 1.0) != c.right]


def test_the_answers() -> None:
    assert len(CASES) == 500 and {c.family for c in CASES} == FAMILIES.keys()
    assert Counter(c.right for c in CASES)[True] == 252 and cases(1) != CASES == cases(0)


def test_our_grader_judges_all_of_them() -> None:
    assert wrong(math_equal(ROWS)) == []


def test_our_grader_on_other_answers() -> None:
    more = cases(7, 300)
    found = math_equal([{"completion": c.completion, "answer": c.answer} for c in more])
    assert [c for c, value in zip(more, found, strict=True) if (value == 1.0) != c.right] == []


@pytest.mark.thorough
def test_math_verify_judges_all_but_one_that_it_rounds() -> None:
    pytest.importorskip("math_verify")
    assert wrong(math_verify(ROWS)) == [("scientific", "410000")]


@pytest.mark.parametrize(("completion", "answer", "expected"), [
    ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0), ("so \\boxed{3}", "0.5", 0.0), ("", "5", 0.0), ("#### 72", "work\n#### 72", 1.0),
    ("\\boxed{7}", ["5", "7"], 1.0), ("\\boxed{", "5", 0.0), ("\\boxed{import os}", "5", 0.0)])
def test_math_verify(completion: str, answer: object, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert math_verify([{"completion": completion, "answer": answer}]) == [expected]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'rldsl\[math\]'"):
        math_verify([{"completion": "1", "answer": "1"}])


def test_without_the_column() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(LookupError, match="no column `answer`"):
        math_verify([{"completion": "1"}])
