"""Rewards for the examples. A reward takes the rows of a batch and returns one number per row.

A row is a dict: `prompt` and `completion` as text, and every column of the data file under its own name.
"""


def exact_match(rows: list[dict]) -> list[float]:
    """1 if the completion is the row's answer, else 0."""
    return [float(row["completion"].strip() == str(row["answer"]).strip()) for row in rows]


def digits_only(rows: list[dict]) -> list[float]:
    """1 if the completion is a number and nothing else, else 0."""
    return [float(row["completion"].strip().isdigit()) for row in rows]
