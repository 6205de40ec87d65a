"""Places on a line, as near to where each wants to be as the others allow."""

from __future__ import annotations

from collections.abc import Sequence


def spread(goals: Sequence[float], weights: Sequence[float], apart: Sequence[float]) -> list[float]:
    """The places x that make the sum of weights * (x - goals)^2 least with x[i+1] - x[i] >= apart[i]: isotonic
    regression of the goals less what must lie before them (pool adjacent violators, Barlow et al. 1972)."""
    before = [0.0]
    for gap in apart:
        before.append(before[-1] + gap)
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for goal, weight, shift in zip(goals, weights, before, strict=False):
        mean, count = goal - shift, 1
        while pools and pools[-1][0] >= mean:
            other, heavy, many = pools.pop()
            mean, weight, count = (mean * weight + other * heavy) / (weight + heavy), weight + heavy, count + many
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + shift for mean, shift in zip(means, before, strict=False)]
