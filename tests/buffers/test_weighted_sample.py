"""The pure function by which rows are drawn: its distribution, and that it depends on the seed and the rows alone."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
import torch

from rldsl.runtime.weighted_sample import weighted_sample

DRAWS = 50_000  # of two rows each
# Chi-square quantiles at 1 - 1e-6 by degrees of freedom: the seed is fixed, so the result is, too.
QUANTILE = {9: 46.3, 5: 36.5}


def _counts(weights: list[float] | None, size: int, k: int) -> dict[tuple[int, ...], int]:
    """How often each set is drawn, over `DRAWS` steps."""
    numbers = torch.arange(10, 10 + size)
    given = None if weights is None else torch.tensor(weights)
    counts = dict.fromkeys(combinations(range(size), k), 0)
    for step in range(DRAWS):
        counts[tuple(weighted_sample(numbers, given, k, 7, step).tolist())] += 1
    return counts


def _successive(weights: list[float], chosen: tuple[int, ...]) -> float:
    """The probability of a set under successive sampling: over all orders in which it may be drawn."""
    total = 0.0
    for order in permutations(chosen):
        p, left = 1.0, sum(weights)
        for i in order:
            p, left = p * weights[i] / left, left - weights[i]
        total += p
    return total


def _chi_square(counts: dict[tuple[int, ...], int], probability: dict[tuple[int, ...], float]) -> float:
    return sum((n - DRAWS * probability[s]) ** 2 / (DRAWS * probability[s]) for s, n in counts.items())


def test_uniform() -> None:
    counts = _counts(None, 5, 2)
    assert _chi_square(counts, dict.fromkeys(counts, 1 / len(counts))) < QUANTILE[len(counts) - 1]


def test_weighted() -> None:
    weights = [1.0, 2.0, 0.25, 4.0]
    counts = _counts(weights, 4, 2)
    stated = {s: _successive(weights, s) for s in counts}
    assert sum(stated.values()) == pytest.approx(1)
    assert _chi_square(counts, stated) < QUANTILE[len(counts) - 1]
    # k independent draws of w, given that they differ, have other probabilities: the test sees the difference
    pairs = {s: weights[s[0]] * weights[s[1]] for s in counts}
    assert _chi_square(counts, {s: p / sum(pairs.values()) for s, p in pairs.items()}) > 1000


def test_weight_zero_is_never_drawn() -> None:
    numbers, weights = torch.arange(6), torch.tensor([0.0, 1, 0, 1e-30, 1, 0])
    assert weighted_sample(numbers, weights, 6, 1, 1).tolist() == [1, 3, 4]
    assert weighted_sample(numbers, torch.zeros(6), 6, 1, 1).tolist() == []


def test_fewer_rows_than_asked_for() -> None:
    assert weighted_sample(torch.arange(3), None, 5, 1, 1).tolist() == [0, 1, 2]
    assert weighted_sample(torch.arange(0), None, 5, 1, 1).tolist() == []


def test_follows_the_number_of_the_row() -> None:
    """Rows that are drawn remain drawn when rows with other numbers leave that were not drawn."""
    numbers = torch.arange(100)
    drawn = weighted_sample(numbers, None, 10, 3, 4)
    fewer = numbers[50:]
    at = weighted_sample(fewer, None, 10, 3, 4)
    assert set(numbers[drawn].tolist()) & set(range(50, 100)) <= set(fewer[at].tolist())


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_refuses_weights(bad: float) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        weighted_sample(torch.arange(2), torch.tensor([1.0, bad]), 1, 1, 1)
