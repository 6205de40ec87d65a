"""A plan for the eyes of a person: labels instead of ids that the compiler made, and control characters escaped.

In: a plan, which may come from elsewhere. Out: the same plan with every string written as `diag.visible` does, ends of
lines included, so that no name can imitate or hide a line of a table. Only text for people is made of it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from rldsl.diag import visible
from rldsl.plan.model import Plan
from rldsl.plan.naming import labelled


def visible_plan(plan: Plan) -> Plan:
    """The plan itself where there is nothing to escape."""
    found = _visible(labelled(plan))
    return found if isinstance(found, Plan) else plan


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, tuple):
        parts = tuple(_visible(x) for x in value)
        return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if is_dataclass(value) and not isinstance(value, type):
        new = {f.name: _visible(getattr(value, f.name)) for f in fields(value) if f.init}
        changed = {name: x for name, x in new.items() if x is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value
