"""Rewards written in Python. A function takes the rows of a batch and returns one number per row, in the same order.

A row is a dict: `prompt` and `completion` as text, `prompt_ids` and `completion_ids`, `finished` (the completion was
not cut off), and every column of the data file under its own name. `rlc` never imports this file; the run does.
"""

from typing import Any


def exact_match(rows: list[dict[str, Any]]) -> list[float]:
    """1 if the completion is the row's answer, else 0."""
    return [float(row["completion"].strip() == str(row["answer"]).strip()) for row in rows]
