"""Which metrics come first, and which were measured rather than computed. In: names. Out: an order, a choice."""

from __future__ import annotations

from collections.abc import Iterable

FIRST = ("reward", "score", "accuracy", "kl", "loss")  # what a progress line shows first, by the end of the name
# what differs from run to run and from placement to placement
MEASURED = ("seconds", "tokens_per_second", "time/", "memory/", "moved/", "length/")


def display_order(name: str) -> int:
    """Its place in the order."""
    return next((i for i, end in enumerate(FIRST) if name.endswith(end)), len(FIRST))


def computed(names: Iterable[str]) -> list[str]:
    """Those that the program computes."""
    return [name for name in names if name != "step" and not name.startswith(MEASURED)]
