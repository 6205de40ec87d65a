"""What commands take: a plan, or a program that is compiled first.

In: a path, and values and rules for a program. Out: a plan with its proof. Errors: those of compiling, or of reading
and verifying a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rldsl.commands import Usage
from rldsl.plan.expr import Scalar
from rldsl.python import entry
from rldsl.python.plan import Plan

ENDING = ".plan"


def plan_or_program(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str]) -> Plan:
    """sets, place, overrides: of a program; a plan is what it is."""
    if not file.endswith(ENDING):
        return entry.compile(Path(file), sets, place=Path(place) if place else None, on=overrides)
    if sets or place or overrides:
        raise Usage("--set, --place and --on apply to programs; pass them when compiling the plan")
    return entry.load(file)
