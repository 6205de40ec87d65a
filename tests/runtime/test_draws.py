"""Random draws: strictly inside (0, 1) whatever the counter gives, in float32 too; spread evenly; the
element's alone."""

from __future__ import annotations

import math

import pytest
import torch

from rldsl.runtime.draws import bits, inside, uniform

EXTREMES = torch.tensor([0, 1, -1, -2, (1 << 12) - 1, 1 << 12, (1 << 63) - 1, -(1 << 63), -(1 << 12), -(1 << 36)])


def naive(state: torch.Tensor) -> torch.Tensor:
    """53 bits and a half: what `inside` must not be."""
    return (((state >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_extremes_stay_strictly_inside(dtype: torch.dtype) -> None:
    drawn = inside(EXTREMES).to(dtype)
    assert float(drawn.min()) > 0 and float(drawn.max()) < 1
    assert float(inside(torch.tensor([0]))) == 2.0**-53 and float(inside(torch.tensor([-1]))) == 1 - 2.0**-24


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_check_can_fail(dtype: torch.dtype) -> None:
    assert float(naive(EXTREMES).to(dtype).max()) == 1.0


def test_larger_bits_give_larger_draws() -> None:
    ordered = torch.tensor([0, 1 << 12, 1 << 40, (1 << 63) - 1, -(1 << 63), -(1 << 40)])  # as unsigned numbers
    assert bool((inside(ordered).diff() > 0).all())


def distance(sample: torch.Tensor) -> float:
    """Kolmogorov and Smirnov: the largest distance of the sample's distribution from the uniform one, times sqrt(n)."""
    n = sample.numel()
    ordered, steps = sample.double().sort().values, torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))


LIMIT = 1.95  # passed by one uniform sample in a thousand
ROWS = torch.arange(20_000)


DRAWN = {
    "first tokens of many rows": lambda: uniform(1, 0, ROWS, torch.zeros_like(ROWS)),
    "the tokens of one row": lambda: uniform(1, 0, torch.zeros_like(ROWS), ROWS),
    "both": lambda: uniform(7, 3, ROWS // 100, ROWS % 100),
    "keys that differ in high bits alone": lambda: uniform(0, 0, ROWS * 65_536, torch.zeros_like(ROWS)),
    "seeds": lambda: torch.cat([uniform(seed, 0, ROWS[:1], ROWS[:1]) for seed in range(3000)]),
    "steps": lambda: torch.cat([uniform(1, step, ROWS[:1], ROWS[:1]) for step in range(3000)]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_draws_are_uniform(name: str) -> None:
    drawn = DRAWN[name]()
    assert distance(drawn) < LIMIT
    pairs = torch.stack([drawn[:-1], drawn[1:]]) - 0.5
    assert abs(float((pairs[0] * pairs[1]).mean())) * 12 * math.sqrt(drawn.numel()) < 4, "neighbors are independent"


@pytest.mark.parametrize("wrong", [
    uniform(1, 0, ROWS, ROWS * 0) ** 1.05, uniform(1, 0, ROWS, ROWS * 0) * 0.98,
    uniform(1, 0, ROWS, ROWS * 0).round(decimals=1), ROWS.double() / 20_000 * 0.5,
])
def test_the_distance_sees_what_is_not_uniform(wrong: torch.Tensor) -> None:
    assert distance(wrong) > LIMIT


def test_a_draw_is_that_of_its_element() -> None:
    rows, positions = torch.arange(64) % 8, torch.arange(64) // 8
    whole, order = uniform(5, 9, rows, positions), torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(5, 9, rows[order], positions[order]), whole[order])
    assert torch.equal(torch.cat([uniform(5, 9, r, p) for r, p in zip(rows.split(7), positions.split(7))]), whole)
    for other in ((6, 9, rows, positions), (5, 10, rows, positions), (5, 9, positions, rows + 1)):
        assert not bool((uniform(*other) == whole).any())
    assert bits(5, 9, rows, positions).unique().numel() == 64
