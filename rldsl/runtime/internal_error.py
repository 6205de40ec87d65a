"""Values that the plan's verifier guarantees: without one, this package contradicts itself, and the run ends."""

from __future__ import annotations

from typing import TypeVar

from rldsl.diag import internal_error

T = TypeVar("T")


def present(value: T | None, what: str) -> T:
    """`value`, which cannot be None here. what: its name, for the message. Raises InternalError (RL0699)."""
    if value is None:
        raise internal_error(f"there is no {what}", place="run")
    return value
