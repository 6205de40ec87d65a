"""Sums of flow arithmetic: exact, whatever the order of the terms and however ranks divide them."""

from __future__ import annotations

import math

import pytest
import torch

from rldsl.runtime.interpreter.exact_sums import exact_sum, exact_words


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    """float64 of all magnitudes and both signs, many of which cancel."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=draw, dtype=torch.float64)
    x = x * 2.0 ** torch.randint(-200, 200, (count,), generator=draw).double()
    return torch.cat([x, -x[: count // 2] * (1 + 2.0**-50)])


@pytest.mark.parametrize("seed", range(5))
def test_a_sum_is_the_nearest_number(seed: int) -> None:
    x = numbers(1000, seed)
    assert exact_sum(exact_words(x)) == math.fsum(x.tolist())


def test_order_and_division_change_nothing() -> None:
    x = numbers(999)
    right = exact_sum(exact_words(x))
    for parts in (1, 2, 7):
        shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(parts))]
        words = sum(exact_words(part) for part in shuffled.chunk(parts))
        assert isinstance(words, torch.Tensor) and exact_sum(words) == right


@pytest.mark.parametrize("terms", [
    [], [0.0, -0.0], [5e-324] * 3, [5e-324, 1.0, -1.0], [2.2e-308, -1.1e-308], [1.7976931348623157e308, -1e292],
    [1.7976931348623157e308, 1.7976931348623157e308, -1.7976931348623157e308], [2.0**53, 1.0, 1.0], [-3.5]])
def test_the_ends_of_the_range(terms: list[float]) -> None:
    from fractions import Fraction

    assert exact_sum(exact_words(torch.tensor(terms, dtype=torch.float64))) == float(sum(map(Fraction, terms)))


@pytest.mark.parametrize("terms, right", [
    ([1.0, math.inf], math.inf), ([-math.inf, 1e308], -math.inf), ([math.inf, -math.inf], math.nan),
    ([math.nan, 1.0], math.nan), ([1.7976931348623157e308] * 2, math.inf), ([-1.7976931348623157e308] * 2, -math.inf)])
def test_what_is_no_number(terms: list[float], right: float) -> None:
    found = exact_sum(exact_words(torch.tensor(terms, dtype=torch.float64)))
    assert found == right or math.isnan(found) and math.isnan(right)


def test_many_terms_do_not_overflow() -> None:
    x = torch.full((1 << 20,), 1 - 2.0**-53, dtype=torch.float64)
    assert exact_sum(exact_words(x) * 512) == (1 << 29) * (1 - 2.0**-53)  # as of 512 ranks
