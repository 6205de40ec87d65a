"""Communicators: what the runtime must create at start-up. In: events and tables. Out: Group records, deduplicated.

Layouts of calls need "tp", "pp", "dp", "cp" and "ep" where the degree is above 1, "expert_dp" where several runs of ep
ranks have all experts each, and "mesh" when they have several ranks. Kinds with `communicators="mesh"`
(`plan/traits.py`), such as Lengths and Compute, need their mesh. Point-to-point events (Transfer, Realloc, Log) need
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rldsl.plan.events import Event
from rldsl.plan.model import Group, Layout, Mesh
from rldsl.plan.references import named

AXES = ("tp", "pp", "dp", "cp", "ep")


def groups(events: Iterable[Event], layouts: Mapping[str, Layout], meshes: Mapping[str, Mesh]) -> tuple[Group, ...]:
    """In the order of first need."""
    keys: dict[tuple[str, str, str], None] = {}  # (axis, layout, mesh)
    for e in events:
        if e.traits.communicators == "layout":
            layout = layouts[next(r.id for r in named(e, *e.traits.participants))]
            keys |= {(axis, layout.id, ""): None for axis in AXES if getattr(layout, axis) > 1}
            if 1 < layout.ep < layout.dp:
                keys["expert_dp", layout.id, ""] = None
            if meshes[layout.mesh].size > 1:
                keys["mesh", layout.id, ""] = None
        elif e.traits.communicators == "mesh" and meshes[e.mesh].size > 1:
            keys["mesh", "", e.mesh] = None
    return tuple(Group(f"g{i}", *key) for i, key in enumerate(keys))  # type: ignore[arg-type]  # axes, as text
