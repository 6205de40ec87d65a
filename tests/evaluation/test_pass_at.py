"""pass@k of the library against exact combinatorics (Chen et al. 2021, equation 1)."""

from __future__ import annotations

from math import comb, isnan
from sys import float_info

import pytest
import torch

from tests.library.harness import Batch, Given, run_fn


def batch(answers: list[list[float]]) -> tuple[Batch, Given]:
    """Prompts with equally many answers."""
    flat = [x for group in answers for x in group]
    return (Batch({"gen": [1] * len(flat)}, len(answers[0])),
            Given("seq", "gen", torch.tensor(flat, dtype=torch.float64)))


def pass_at(answers: list[list[float]], k: int, dp: int = 1) -> list[float]:
    rows, right = batch(answers)
    return run_fn("std.evaluation", f"pass_at(r, {k})", rows, r=right, dp=dp).reshape(-1).tolist()


def exact(n: int, c: int, k: int) -> float:
    return 1 - comb(n - c, k) / comb(n, k)


@pytest.mark.parametrize("n", [1, 2, 5, 16, 40])
def test_every_count_of_right_answers(n: int) -> None:
    for k in sorted({1, 2, n // 2, n - 1, n} - {0}):
        if k <= n:
            got = pass_at([[1.0] * c + [0.0] * (n - c) for c in range(n + 1)], k)
            assert got == pytest.approx([exact(n, c, k) for c in range(n + 1)], abs=1e-14)


@pytest.mark.parametrize("n,k", [(1000, 1), (1000, 10), (1000, 100), (200, 100)])
def test_large_groups(n: int, k: int) -> None:
    counts = (0, 1, n // 10, n // 2, n - 1, n)
    got = pass_at([[1.0] * c + [0.0] * (n - c) for c in counts], k)
    assert got == pytest.approx([exact(n, c, k) for c in counts], abs=float_info.epsilon * max(k, 10))
    assert got[0] == 0 and got[-1] == 1


def test_the_mean_of_all_subsets() -> None:
    """Equation 1 is the share of the k-subsets with a right answer."""
    from itertools import combinations

    right = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    share = [max(s) for s in combinations(right, 3)]
    assert pass_at([right], 3) == pytest.approx([sum(share) / len(share)], abs=1e-15)


def test_pass_at_one_is_the_mean() -> None:
    assert pass_at([[1, 0, 0, 1, 1], [0, 0, 0, 0, 1]], 1) == pytest.approx([0.6, 0.2], abs=1e-15)


def test_graded_answers_count_as_right_above_zero() -> None:
    assert pass_at([[0.5, -1.0, 0.0]], 1) == pytest.approx([1 / 3], abs=1e-15)


def test_none_right_is_zero_and_all_right_is_one() -> None:
    assert pass_at([[0, 0, 0], [1, 1, 1]], 2) == [0, 1]


@pytest.mark.parametrize("n,k", [(1, 2), (3, 4), (3, 100)])
def test_fewer_answers_than_k_have_no_value(n: int, k: int) -> None:
    """Not 1, though no k wrong answers can be drawn."""
    assert all(isnan(x) for x in pass_at([[1.0] * n, [0.0] * n], k))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_shards_do_not_matter(k: int) -> None:
    answers = [[float((i * 7 + j * 3) % 4 == 0) for j in range(4)] for i in range(6)]
    assert pass_at(answers, k, dp=3) == pytest.approx(pass_at(answers, k), abs=1e-12)
