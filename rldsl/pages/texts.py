"""Quantities and names as they are printed on a page."""

from __future__ import annotations

from rldsl.plan.events import Loop, When
from rldsl.plan.model import Ranges


def ranges_text(ranges: Ranges, most: int = 3) -> str:
    """Ranks of a class: "0-3", "0, 8, 16, … (64 ranks)"."""
    shown = [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in ranges[:most]]
    if len(ranges) > most:
        return f"{', '.join(shown)}, … ({sum(b - a for a, b in ranges):,} ranks)"
    return ", ".join(shown)


def block_text(block: Loop | When) -> str:
    """A block as a reader of the program knows it: "every 100", "repeat, at most 3"."""
    if isinstance(block, When):
        return block.head
    if block.over:
        return f"over {block.over}"
    return f"repeat, at most {block.trips:,}" if block.until else f"{block.id} × {block.trips:,}"
