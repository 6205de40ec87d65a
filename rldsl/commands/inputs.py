"""What commands take: a plan, or a program that is compiled first.

In: a path, and values and rules for a program. Out: a plan with its proof. Errors: those of compiling, or of reading
and verifying a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rldsl import api
from rldsl.commands import Usage
from rldsl.plan.expr import Scalar
from rldsl.python import entry
from rldsl.python.plan import Plan

ENDING = ".plan"


def plan_or_program(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str]) -> Plan:
    """sets, place, overrides: of a program; a plan is what it is."""
    if not file.endswith(ENDING):
        return compiled_program(file, sets, place, overrides)
    if sets or place or overrides:
        raise Usage("--set, --place and --on apply to programs; pass them when compiling the plan")
    return entry.load(file)


def compiled_program(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str],
                     rewrite: api.Rewrite = api.unchanged) -> Plan:
    """The plan of a program. place: a file of rules, or who places the calls. rewrite: what changes the parsed
    program."""
    mode, rules = entry.placing(Path(place) if place else None)
    return entry.compile_source(api.read_source(file), sets, rules, overrides, mode, rewrite)
