"""Every communicator that an event needs is declared, once.

In: tables. Out: diagnostics RL0531 (missing), RL0532 (declared twice or malformed). What is needed: for each layout of
a Load, Generate, Infer or Train the axes tp, pp, dp, cp and ep with a degree above 1, "copies" when several ranks hold
the same experts, and "mesh" when it has several
ranks; for Lengths, Compute, Save and Checkpoint the mesh of the event when it has several. Transfers, reallocs and
logs are point to point and use the group of all ranks. Groups are created at start-up, in their order, so declared
means declared before use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.events import Checkpoint, Compute, Event, Generate, Infer, Lengths, Load, Save, Train
from rldsl.plan.model import Group
from rldsl.verify.tables import Tables, name, problem

Key = tuple[str, str, str]  # (axis, layout, mesh); the mesh is "" where a layout is named


def check(t: Tables) -> Iterator[Diagnostic]:
    keys = [(g.axis, g.layout, "" if g.layout else g.mesh) for g in t.plan.groups]
    for group, key in zip(t.plan.groups, keys):
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
    match e:
        case Load() | Generate() | Infer() | Train():
            layout = t.layouts[e.layout]
            for axis in ("tp", "pp", "dp", "cp", "ep"):
                if getattr(layout, axis) > 1:
                    yield axis, layout.id, ""
            if layout.ep > 1 and layout.dp > layout.ep:
                yield "copies", layout.id, ""
            if len(t.ranks[layout.mesh]) > 1:
                yield "mesh", layout.id, ""
        case Lengths() | Compute() | Save() | Checkpoint():
            if len(t.event_ranks(e)) > 1:
                yield "mesh", "", e.mesh


def _fault(t: Tables, g: Group) -> str:
    if g.layout:
        if g.layout not in t.layouts:
            return f"names no layout of the plan: {g.layout!r}"
        return (
            ""
            if g.mesh in ("", t.layouts[g.layout].mesh)
            else f"names mesh {g.mesh}, which is not that of layout {g.layout}"
        )
    if g.axis != "mesh":
        return f"has axis {g.axis} but no layout"
    return "" if g.mesh in t.meshes else f"names no mesh of the plan: {g.mesh!r}"


def _say(key: Key) -> str:
    axis, layout, mesh = key
    return f"group {axis} of " + (f"layout {layout}" if layout else f"mesh {mesh}")
