"""Which metrics come first, and which were measured rather than computed. In: names. Out: an order, a choice."""

from __future__ import annotations

from collections.abc import Iterable

from rldsl.plan.metrics_file import BUILT_IN

FIRST = ("reward", "score", "accuracy", "kl", "loss")  # what a progress line shows first, by the end of the name


def display_order(name: str) -> int:
    """The position of a metric in the order; lower comes first."""
    return next((i for i, end in enumerate(FIRST) if name.endswith(end)), len(FIRST))


def computed(names: Iterable[str]) -> list[str]:
    """The metrics that the program computes."""
    return [name for name in names if name not in BUILT_IN]
