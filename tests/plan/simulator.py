"""A second opinion on a plan, as plain as can be: every rank steps through its class's list, and an event happens when
all its participants are at it. Knows nothing of `rldsl.plan.verify`. Loops run twice and `every` always."""

from __future__ import annotations

from rldsl.plan.model import Event, Every, Free, Item, Log, Loop, Plan, Realloc, Train, Transfer


def runs(plan: Plan) -> bool:
    """True when nobody waits for ever and every rank finds what it reads, once written and in the current version."""
    mesh = {m.id: set(m.members()) for m in plan.meshes}
    home = {x.id: x.mesh for x in (*plan.spreads, *plan.layouts)}
    lists = {r: [] for r in range(plan.header.world)}
    position = {}
    for c in plan.classes:
        for a, b in c.ranks:
            for r in range(a, b):
                if r not in lists or lists[r]:
                    return False
                lists[r] = list(c.events)
    events: dict[int, Event] = {}
    outside, inside = [], []
    for item in plan.body:
        collect(item, inside if isinstance(item, Loop) else outside)
    events = {e.id: e for e in outside + inside}
    if len(events) < len(outside + inside):
        return False
    looped = {e.id for e in inside}
    for r, order in lists.items():
        if any(i not in events for i in order):
            return False
        lists[r] = [i for i in order if i not in looped] + 2 * [i for i in order if i in looped]
        position[r] = 0
    held: dict[int, dict[str, int]] = {r: {} for r in lists}
    version: dict[str, int] = {}
    while any(position[r] < len(lists[r]) for r in lists):
        ready = None
        for r in lists:
            if position[r] < len(lists[r]):
                e = events[lists[r][position[r]]]
                if (
                    all(position[q] < len(lists[q]) and lists[q][position[q]] == e.id for q in mesh[e.mesh])
                    and r in mesh[e.mesh]
                ):
                    ready = e
        if ready is None or not happens(ready, mesh, home, held, version, plan):
            return False
        for r in mesh[ready.mesh]:
            position[r] += 1
    values = {v.id for v in plan.values}
    return not any(b.rpartition("@")[0] in values for h in held.values() for b in h)


def collect(item: Item, into: list[Event]) -> None:
    if isinstance(item, Loop | Every):
        for x in item.body:
            collect(x, into)
    else:
        into.append(item)


def happens(e: Event, mesh, home, held, version, plan: Plan) -> bool:
    parameters = {m.name for m in plan.models}
    here = mesh[e.mesh]
    for b in e.reads:
        where = mesh[home[b.rpartition("@")[2]]]
        if isinstance(e, Log):
            needing = {min(where)}
        elif isinstance(e, Transfer | Realloc):
            needing = where
        else:
            needing = here
        model = b.rpartition("@")[0]
        for r in needing:
            if r not in here or b not in held[r] or model in parameters and held[r][b] != version[model]:
                return False
    if isinstance(e, Free):
        for b in e.buffers:
            for r in mesh[home[b.rpartition("@")[2]]]:
                if r not in here or held[r].pop(b, None) is None:
                    return False
    for b in e.writes:
        model = b.rpartition("@")[0]
        if model in parameters:
            version[model] = version.get(model, 0) + isinstance(e, Train)
        for r in mesh[home[b.rpartition("@")[2]]]:
            if r not in here or b in held[r] and model not in parameters:
                return False
            held[r][b] = version.get(model, 0)
    return True
