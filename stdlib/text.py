"""Texts of sequences as prompts for another model: `use py "std/text.py" (whole: gen -> prompts(max_tokens=2k))`.

A row is a dict with `prompt` and `completion` as text.
"""

from __future__ import annotations

from typing import Any


def whole(rows: list[dict[str, Any]]) -> list[str]:
    """The prompt and the response, as one text."""
    return [row["prompt"] + row["completion"] for row in rows]


def question(rows: list[dict[str, Any]]) -> list[str]:
    """The prompt alone: what another model answers to it."""
    return [row["prompt"] for row in rows]
