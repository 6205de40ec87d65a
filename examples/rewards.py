"""Rewards of the examples. A reward gets the rows of a batch and returns one number for each.

A row is a dict: `prompt` and `completion` as text, and every column of the data file under its own name.
"""


def exact_match(rows: list[dict]) -> list[float]:
    """1 where the completion is the row's answer, else 0."""
    return [float(row["completion"].strip() == str(row["answer"]).strip()) for row in rows]


def digits_only(rows: list[dict]) -> list[float]:
    """1 where the completion is a number and nothing else, else 0."""
    return [float(row["completion"].strip().isdigit()) for row in rows]
