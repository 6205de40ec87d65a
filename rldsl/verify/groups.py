"""Every communicator that an event needs is declared, once.

In: tables. Out: diagnostics RL0531 (missing), RL0532 (declared twice or malformed). What is needed, by the traits of
the kind: of the event's layout, the axes tp, pp, dp, cp and ep with a degree above 1, "expert_dp" if several ranks hold
the same experts, and "mesh" if it has several ranks; or the mesh of the event if it has several; or none:
point-to-point messages use the group of all ranks. Groups are created at start-up, in their order, so a declared group
exists before it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import assert_never

from rldsl.diag import Diagnostic
from rldsl.plan.events import Event
from rldsl.plan.model import Group
from rldsl.plan.references import Role, references
from rldsl.verify.tables import Tables, name, problem

Key = tuple[str, str, str]  # (axis, layout, mesh); the mesh is "" if a layout is named


def check_groups(t: Tables) -> Iterator[Diagnostic]:
    keys: list[Key] = [(g.axis, g.layout, "" if g.layout else g.mesh) for g in t.plan.groups]
    for group in t.plan.groups:
        if fault := _fault(t, group):
            yield problem("RL0532", f"group {group.id} {fault}")
    for key, count in Counter(keys).items():
        if count > 1:
            yield problem("RL0532", f"{_say(key)} is declared {count} times")
    missing: dict[Key, Event] = {}
    for event, _ in t.events:
        for key in _needs(t, event):
            if key not in keys:
                missing.setdefault(key, event)
    for key, event in missing.items():
        yield problem(
            "RL0531",
            f"{name(event)} needs {_say(key)}, which the plan does not declare",
            event,
            ranks=t.event_ranks(event),
        )


def _needs(t: Tables, e: Event) -> Iterator[Key]:
    match e.traits.communicators:
        case "layout":
            layout = t.layouts[next(r.id for r in references(e) if r.role is Role.LAYOUT)]
            for axis in ("tp", "pp", "dp", "cp", "ep"):
                if getattr(layout, axis) > 1:
                    yield axis, layout.id, ""
            if layout.ep > 1 and layout.dp > layout.ep:
                yield "expert_dp", layout.id, ""
            if len(t.ranks[layout.mesh]) > 1:
                yield "mesh", layout.id, ""
        case "mesh":
            if len(t.event_ranks(e)) > 1:
                yield "mesh", "", e.mesh
        case "none":
            pass
        case unknown:
            assert_never(unknown)


def _fault(t: Tables, g: Group) -> str:
    if g.layout:
        if g.layout not in t.layouts:
            return f"refers to an unknown layout {g.layout!r}"
        return (
            ""
            if g.mesh in ("", t.layouts[g.layout].mesh)
            else f"refers to mesh {g.mesh}, which is not the mesh of layout {g.layout}"
        )
    if g.axis != "mesh":
        return f"has axis {g.axis} but no layout"
    return "" if g.mesh in t.meshes else f"refers to an unknown mesh {g.mesh!r}"


def _say(key: Key) -> str:
    axis, layout, mesh = key
    return f"group {axis} of " + (f"layout {layout}" if layout else f"mesh {mesh}")
