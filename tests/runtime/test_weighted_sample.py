"""Sampling by weight without replacement against its stated distribution, with a fixed seed."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from rldsl.runtime.weighted_sample import sample_by_weight

WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5, 4.0, 2.5], np.float32)
DRAWS = 40_000


@pytest.fixture(scope="module")
def pairs() -> list[tuple[int, ...]]:
    """What is drawn in each of DRAWS steps."""
    return [tuple(sample_by_weight(WEIGHTS, 2, 11, step).tolist()) for step in range(DRAWS)]


def successive(order: tuple[int, ...]) -> float:
    """The probability of drawing these rows in this order, each by weight among those that are left."""
    left, p = float(WEIGHTS.sum()), 1.0
    for row in order:
        p *= float(WEIGHTS[row]) / left
        left -= float(WEIGHTS[row])
    return p


def chi_square(found: Counter[tuple[int, ...]], count: int) -> tuple[float, int]:
    """The statistic, and its degrees of freedom."""
    expected = {order: DRAWS * successive(order) for order in permutations(range(len(WEIGHTS)), count)
                if successive(order)}
    assert abs(sum(expected.values()) - DRAWS) < 1e-6 * DRAWS and found.keys() <= expected.keys()
    return sum((found[order] - n) ** 2 / n for order, n in expected.items()), len(expected) - 1


@pytest.mark.thorough
def test_two_rows_are_drawn_one_after_the_other_by_weight(pairs: list[tuple[int, ...]]) -> None:
    """Ordered pairs: for 19 degrees of freedom, 1 of 1,000 samples has a statistic above 43.8."""
    statistic, freedom = chi_square(Counter(pairs), 2)
    assert freedom == 19 and statistic < 43.8


def test_it_is_not_two_draws_with_replacement(pairs: list[tuple[int, ...]]) -> None:
    """The test can fail: it tells the second row's distribution from that of a first row."""
    second = Counter(b for _, b in pairs[:20_000])
    share = WEIGHTS / WEIGHTS.sum()
    statistic = sum((second[i] - 20_000 * p) ** 2 / (20_000 * p) for i, p in enumerate(share.tolist()) if p)
    assert statistic > 200


def test_a_row_without_weight_is_never_drawn_and_no_row_twice() -> None:
    for step in range(200):
        rows = sample_by_weight(WEIGHTS, 6, 3, step).tolist()
        assert sorted(rows) == [0, 2, 3, 4, 5]
    assert sample_by_weight(np.zeros(4, np.float32), 2, 1, 1).tolist() == []
    assert sample_by_weight(WEIGHTS, 0, 1, 1).tolist() == []


def test_a_draw_depends_on_seed_step_and_row_alone() -> None:
    weights = np.linspace(0.1, 3, 1000).astype(np.float32)
    first = sample_by_weight(weights, 16, 5, 9)
    assert first.tolist() == sample_by_weight(weights, 16, 5, 9).tolist()
    assert first.tolist() != sample_by_weight(weights, 16, 5, 10).tolist()
    assert first.tolist() != sample_by_weight(weights, 16, 6, 9).tolist()
    assert sample_by_weight(weights, 32, 5, 9).tolist()[:16] == first.tolist()
    without = weights.copy()
    without[np.setdiff1d(np.arange(0, 1000, 2), first)] = 0  # rows that were not drawn change nothing
    assert sample_by_weight(without, 16, 5, 9).tolist() == first.tolist()


def test_numbers_of_items_name_their_random_numbers() -> None:
    weights, numbers = np.ones(50, np.float32), np.arange(50) + 1000
    turned = sample_by_weight(weights[::-1].copy(), 8, 5, 9, numbers[::-1].copy())
    assert numbers[::-1][turned].tolist() == numbers[sample_by_weight(weights, 8, 5, 9, numbers)].tolist()
    assert sample_by_weight(weights, 8, 5, 9).tolist() != sample_by_weight(weights, 8, 5, 9, numbers).tolist()


def test_tiny_and_huge_weights() -> None:
    weights = np.array([1e-30, 1e30, 1e-30, 1e30], np.float32)
    assert sorted(sample_by_weight(weights, 2, 1, 1).tolist()) == [1, 3]
    assert sorted(sample_by_weight(weights, 4, 1, 1).tolist()) == [0, 1, 2, 3]


@pytest.mark.thorough
def test_equal_weights_draw_every_set_equally_often() -> None:
    """Chi-square of 9 degrees of freedom: 1 of 1,000,000 samples is above 46.3."""
    draws, sets = 20_000, Counter[tuple[int, ...]]()
    for step in range(draws):
        sets[tuple(sorted(sample_by_weight(np.ones(5), 2, 7, step).tolist()))] += 1
    assert len(sets) == 10 and sum((n - draws / 10) ** 2 / (draws / 10) for n in sets.values()) < 46.3


def test_fewer_items_than_asked_for() -> None:
    assert sorted(sample_by_weight(np.ones(3), 5, 1, 1).tolist()) == [0, 1, 2]
    assert sample_by_weight(np.ones(0), 5, 1, 1).tolist() == []
    assert sorted(sample_by_weight(np.array([0, 1, 0, 1e-30, 1, 0]), 6, 1, 1).tolist()) == [1, 3, 4]


def test_a_draw_follows_the_numbers_of_the_items() -> None:
    """Items that are drawn remain drawn when others leave that were not drawn."""
    numbers = np.arange(100)
    first = numbers[sample_by_weight(np.ones(100), 10, 3, 4, numbers)]
    fewer = numbers[50:]
    second = fewer[sample_by_weight(np.ones(50), 10, 3, 4, fewer)]
    assert {n for n in first.tolist() if n >= 50} <= set(second.tolist())


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_refuses_weights(bad: float) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        sample_by_weight(np.array([1.0, bad]), 1, 1, 1)
