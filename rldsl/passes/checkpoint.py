"""Checkpoint: the end of every step of a program that has one.

In: an ordered draft with frees. Out: the same with one Checkpoint after everything else. Invariant: it reads what the
next step takes over from this one: trained copies, models that follow others, states, replay buffers, and the value
that may stop the run.
"""

from __future__ import annotations

from dataclasses import replace

from rldsl.passes.draft import Draft, events
from rldsl.placement.model import mesh_of_range
from rldsl.plan.events import Checkpoint, Realloc, Train


def checkpoint(draft: Draft) -> Draft:
    statement = draft.placed.graph.checkpoint
    if statement is None:
        return draft
    trained = {f"{e.model}@{e.layout}" for e in events(draft.body) if isinstance(e, Train)}
    follow = {e.model: f"{e.model}@{e.dst}" for e in events(draft.body) if isinstance(e, Realloc) and e.source}
    states = [f"{s.value}@{s.spread}" for s in draft.states if s.spread in draft.spreads]
    states += [f"{b.value}@{b.spread}" for b in draft.buffers]
    states += [draft.stops_on] if draft.stops_on else []
    mesh = mesh_of_range(draft.placed.world)
    last = Checkpoint(id=0, mesh=mesh.id, reads=(*sorted(trained), *(b for _, b in sorted(follow.items())), *states),
                      at=str(statement.span), every=statement.every, keep_last=statement.keep_last,
                      until=draft.stops_on)
    return replace(draft, body=(*draft.body, last)).with_meshes(mesh)
