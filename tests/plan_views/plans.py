"""Plans to look at and to compare: the sample that is written by hand, and ways to change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rldsl.plan.codec import encode
from rldsl.plan.events import Event, Item
from rldsl.plan.model import Plan
from tests.plan.sample import grpo

__all__ = ["encode", "grpo", "change", "drop", "edit", "insert", "renumbered"]


def edit(items: tuple[Item, ...], step: Callable[[Item], Iterator[Item]]) -> tuple[Item, ...]:
    """Each item replaced by what `step` makes of it, inner ones first."""
    return tuple(made for item in items for made in step(
        item if isinstance(item, Event) else replace(item, body=edit(item.body, step))))


def change(plan: Plan, id: int, **fields: Any) -> Plan:
    """One event with other fields."""
    return replace(plan, body=edit(plan.body, lambda i: iter(
        [replace(i, **fields) if isinstance(i, Event) and i.id == id else i])))


def drop(plan: Plan, *ids: int) -> Plan:
    return replace(plan, body=edit(plan.body, lambda i: iter(
        [] if isinstance(i, Event) and i.id in ids else [i])))


def insert(plan: Plan, after: int, event: Event) -> Plan:
    return replace(plan, body=edit(plan.body, lambda i: iter(
        [i, event] if isinstance(i, Event) and i.id == after else [i])))


def renumbered(plan: Plan, by: int) -> Plan:
    """Every event with another id."""
    return replace(plan, body=edit(plan.body, lambda i: iter(
        [replace(i, id=i.id + by) if isinstance(i, Event) else i])),
        classes=tuple(replace(c, events=tuple(e + by for e in c.events)) for c in plan.classes))
