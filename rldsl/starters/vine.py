"""Rewards of whole responses, also of those that were continued from a beginning."""

from typing import Any

from rldsl.stdlib.rewards import last_number, whole

Row = dict[str, Any]


def right(rows: list[Row]) -> list[float]:
    """Whether the last number of the response is that of the answer."""
    return last_number(rows)


def right_after(rows: list[Row]) -> list[float]:
    """The same of continuations of the beginning of a response, `gen`: of the beginning and what follows it."""
    return last_number(whole(rows, "gen"))
