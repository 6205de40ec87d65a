"""Errors that are this package's own mistakes, never the user's: they end a run with RL0799 and a traceback."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class InternalError(Exception):
    """Something that the plan's verifier or this package's own code rules out has happened."""


def present(value: T | None, what: str) -> T:
    """`value`, which cannot be None here. what: of what it is, for the message."""
    if value is None:
        raise InternalError(f"there is no {what}")
    return value
