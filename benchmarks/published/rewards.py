"""A reward that compares answers. Nothing calls it here: predictions count its rows."""

from __future__ import annotations


def correct(gen: object) -> list[float]:
    return [0.0] * len(gen)  # type: ignore[arg-type]
