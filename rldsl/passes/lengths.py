"""Lengths: who must know how long each row is, and the exchange that tells them.

In: a draft with all transfers. Out: the same with a Lengths event after each generate, over every rank that divides or
cuts that frame's rows, and with the mesh of each fetch: all ranks that read what it writes or need its lengths.
Invariant: wherever rows are divided by tokens, the lengths are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from rldsl.passes.draft import Draft, all_spread, each_block, events, frames_with_needed_lengths
from rldsl.placement.model import mesh_of
from rldsl.plan.events import Collect, Event, Fetch, Generate, Item, Lengths, Loop, Select, split_buffer
from rldsl.plan.model import Mesh, Spread


def lengths(draft: Draft) -> Draft:
    touched, given = _touched(draft), draft.spreads
    whole: dict[str, Spread] = {}
    for id, ranks in touched.items():
        mesh = mesh_of(ranks)
        draft = draft.with_meshes(mesh)
        whole[id] = Spread(id, mesh.id, granularity="all")
    draft = draft.with_spreads(*whole.values())
    for e in events(draft.body):
        if _makes_rows(e):
            spread = whole[all_spread(draft, e.frame)]
            draft = draft.with_meshes(_mesh(draft, spread, e))

    def insert(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Fetch):
                out.append(replace(item, mesh=whole[split_buffer(item.writes[0])[1]].mesh))
                continue
            if isinstance(item, Event) and _in_full(item, given):  # lengths that nobody needs go
                out += [replace(item, mesh=whole[item.dst].mesh)] if item.dst in whole else []
                continue
            out.append(item)
            if isinstance(item, Event) and _makes_rows(item):
                out.append(_exchange(draft, item, whole[all_spread(draft, item.frame)]))
        return tuple(out)

    return replace(draft, body=each_block(each_block(draft.body, insert), _collects))


def _collects(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Loops that name what their bodies collect, now that it is known."""
    return tuple(replace(i, collects=tuple(b for e in i.body if isinstance(e, Collect) for b in e.writes))
                 if isinstance(i, Loop) else i for i in items)


def _in_full(e: Event, given: Mapping[str, Spread]) -> TypeGuard[Collect]:
    """Whether it collects what every rank that needs it holds in full. given: spreads of the draft before this pass,
    which defines those of what is held in full."""
    return isinstance(e, Collect) and e.dst not in given


def _makes_rows(e: Event) -> TypeGuard[Generate | Select]:
    return isinstance(e, Generate) or isinstance(e, Select) and bool(e.condition)


def _touched(draft: Draft) -> dict[str, set[int]]:
    """Unit-"all" spread -> the ranks that must hold it."""
    touched: dict[str, set[int]] = defaultdict(set)
    values = draft.values
    every = tuple(events(draft.body))
    for e in every:
        if isinstance(e, Fetch):
            touched[split_buffer(e.writes[0])[1]]  # a batch that nobody reads is still fetched somewhere
        if _makes_rows(e):
            touched[all_spread(draft, e.frame)] |= draft.ranks(e.mesh)
        if not _in_full(e, draft.spreads):
            for frame in frames_with_needed_lengths(draft, e, values):
                touched[all_spread(draft, frame)] |= draft.ranks(e.mesh)
            for buffer in e.reads:
                right = split_buffer(buffer)[1]
                if right not in draft.spreads and right not in draft.layouts:
                    touched[right] |= draft.ranks(e.mesh)
    for e in every:  # what is collected in full is known there turn by turn
        if _in_full(e, draft.spreads) and touched.get(e.dst):
            touched[e.src] |= touched[e.dst]
    sources: dict[str, list[str]] = defaultdict(list)
    for e in every:
        if isinstance(e, Fetch):
            sources[e.data].append(split_buffer(e.writes[0])[1])
    for ids in sources.values():  # who reads a source takes part in each of its fetches, to know which batch is next
        together = set().union(*(touched[id] for id in ids))
        for id in ids:
            touched[id] = together or {0}
    return {id: ranks or {0} for id, ranks in touched.items()}


def _mesh(draft: Draft, spread: Spread, e: Generate | Select) -> Mesh:
    return mesh_of(draft.ranks(spread.mesh) | draft.ranks(e.mesh))


def _exchange(draft: Draft, e: Generate | Select, whole: Spread) -> Event:
    mesh = _mesh(draft, whole, e)
    spread, frame = draft.spreads[e.spread], draft.frames[e.frame]
    layout = draft.layouts[spread.layout]
    lacking = frame.count * (len(mesh.members()) - layout.tp * layout.pp)  # each row is held by the ranks of a shard
    return Lengths(id=0, mesh=mesh.id, reads=(f"{e.frame}.tokens@{e.spread}",),
                   writes=(f"{e.frame}.lengths@{whole.id}",), at=e.at,
                   because=f"the rows of {draft.labels.name(e.frame)} are divided by length", bytes=16 * lacking,
                   frame=e.frame, spread=e.spread)
