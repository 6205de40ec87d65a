"""Edits of plans by hand, and what the verifier says of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.events import Event, Item
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths, rank_classes
from rldsl.verify import verify


def faults(plan: Plan) -> tuple[Diagnostic, ...]:
    """All that is wrong, each with a code and a place."""
    try:
        verify(plan)
    except Failure as e:
        assert e.diagnostics and all(d.code[:4] in ("RL05", "RL06") and d.place for d in e.diagnostics)
        return e.diagnostics
    return ()


def codes(plan: Plan) -> set[str]:
    return {d.code for d in faults(plan)}


def edited(items: tuple[Item, ...], edit: Callable[[Event], tuple[Event, ...]]) -> tuple[Item, ...]:
    out: list[Item] = []
    for x in items:
        out += edit(x) if isinstance(x, Event) else (replace(x, body=edited(x.body, edit)),)
    return tuple(out)


def with_body(plan: Plan, body: tuple[Item, ...], project: bool = True) -> Plan:
    """The plan with another body; project: classes follow, as a compiler's mistake would have it."""
    if not project:
        return replace(plan, body=body)
    peaks = {r: c.peak_bytes for c in plan.classes for a, b in c.ranks for r in range(a, b)}
    return replace(plan, body=body, classes=rank_classes(plan.meshes, body, plan.header.world, peaks))


def change(plan: Plan, id: int, project: bool = True, **new: object) -> Plan:
    return with_body(plan, edited(plan.body, lambda e: (replace(e, **new) if e.id == id else e,)), project)


def drop(plan: Plan, id: int, project: bool = True) -> Plan:
    return with_body(plan, edited(plan.body, lambda e: () if e.id == id else (e,)), project)


def moved(plan: Plan, id: int, before: int) -> Plan:
    event = next(e for e, _ in event_paths(plan) if e.id == id)
    return with_body(plan, edited(drop(plan, id).body, lambda e: (event, e) if e.id == before else (e,)))


def row(plan: Plan, table: str, number: int, **new: object) -> Plan:
    """With another record in one of its tables."""
    rows = list(getattr(plan, table))
    rows[number] = replace(rows[number], **new)
    return replace(plan, **{table: tuple(rows)})


def swapped(plan: Plan, number: int, a: int, b: int) -> Plan:
    """With events a and b in each other's place in one class's list."""
    order = list(plan.classes[number].events)
    i, j = order.index(a), order.index(b)
    order[i], order[j] = order[j], order[i]
    return row(plan, "classes", number, events=tuple(order))
