"""A second opinion on a plan, as plain as can be: every rank steps through its class's list, and an event happens when
all its participants are at it. Knows nothing of `rldsl.plan.verify`. Loops run twice and `every` always. What a loop
collects is there when it is first appended to, and what ends a loop is gone at once."""

from __future__ import annotations

from rldsl.plan.events import (Checkpoint, Collect, Compute, Event, Every, Free, Item, Lengths, Log, Loop, Realloc,
                               Train, Transfer)
from rldsl.plan.model import Plan


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
    states = {f"{s.value}@{s.spread}" for s in plan.states}
    for b in states:
        for r in mesh[home[b.rpartition("@")[2]]]:
            held[r][b] = 0
    loops = list(blocks(plan.body))
    special = (states, {b for x in loops for b in x.collects}, {x.until for x in loops} - {""})
    if not all(appended(x) for x in loops):
        return False
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
        if ready is None or not happens(ready, mesh, home, held, version, plan, special):
            return False
        for r in mesh[ready.mesh]:
            position[r] += 1
    values = {v.id for v in plan.values}
    return not any(b.rpartition("@")[0] in values and b not in states for h in held.values() for b in h)


def blocks(items):
    for item in items:
        if isinstance(item, Loop | Every):
            yield from [item] if isinstance(item, Loop) else []
            yield from blocks(item.body)


def appended(loop: Loop) -> bool:
    """Every collected buffer is appended to once a turn, and nothing else is."""
    return sorted(b for e in loop.body if isinstance(e, Collect) for b in e.writes) == sorted(loop.collects)


def collect(item: Item, into: list[Event]) -> None:
    if isinstance(item, Loop | Every):
        for x in item.body:
            collect(x, into)
    else:
        into.append(item)


def happens(e: Event, mesh, home, held, version, plan: Plan, special) -> bool:
    states, collects, until = special
    if isinstance(e, Collect):
        for b in e.reads:
            for r in mesh[home[b.rpartition("@")[2]]] if b in collects else ():
                held[r].setdefault(b, 0)
    parameters = {m.name for m in plan.models}
    here = mesh[e.mesh]
    for b in e.reads:
        where = mesh[home[b.rpartition("@")[2]]]
        if isinstance(e, Log):
            needing = {min(where)}
        elif isinstance(e, Transfer | Realloc | Lengths | Checkpoint):
            needing = where
        elif isinstance(e, Collect):
            needing = where & here
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
            again = b in states and isinstance(e, Compute) or b in collects and isinstance(e, Collect)
            if r not in here or b in held[r] and model not in parameters and not again:
                return False
            if b in until:
                continue
            held[r][b] = version.get(model, 0)
    return True
