"""Lengths: who must know how long each row is, and the exchange that tells them.

In: a draft with all transfers. Out: the same with a Lengths event after each generate, and each derive that makes rows,
over every rank that divides or cuts that frame's rows, and with the mesh of each fetch: all ranks that read what it
writes or need its lengths. With a lag there may be two: one for those that need the lengths ahead of the step, one in
the step.
Invariant: wherever rows are divided by tokens, the lengths are there, and every spread and layout that a buffer names
is in the draft's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, LengthsSpreads, each_block, events, frames_with_needed_lengths, makes_rows
from rldsl.passes.draft import union as union_of
from rldsl.passes.run_ahead import run_ahead
from rldsl.placement.model import mesh_of_set
from rldsl.plan.events import (
    Collect,
    Derive,
    Draw,
    Event,
    Fetch,
    Generate,
    Item,
    Lengths,
    Lookup,
    Loop,
    RowStates,
    Sample,
    Transfer,
    Update,
    split_buffer,
)
from rldsl.plan.model import Mesh, Spread
from rldsl.sharding.rank_sets import Ranks, union


def lengths(draft: Draft) -> Draft:
    draft = run_ahead(draft)  # who needs lengths ahead of their step is known from here on
    lengths_in = LengthsSpreads.of(draft)
    ranks_of, divided = _ranks_of_replicated(draft, lengths_in), draft.spreads
    replicated: dict[str, Spread] = {}
    for id, ranks in ranks_of.items():
        mesh = mesh_of_set(ranks)
        draft = draft.with_meshes(mesh)
        replicated[id] = Spread(id, mesh.id, granularity="all")
    draft = draft.with_spreads(*replicated.values())
    for e in events(draft.body):
        if makes_rows(e):
            draft = draft.with_meshes(*(_mesh(draft, s, e) for s in _exchanges(e, lengths_in, replicated)))
        elif isinstance(e, Transfer) and e.dst in replicated:
            draft = draft.with_meshes(_ends(draft, e))

    def insert(items: tuple[Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Fetch | Sample | RowStates):
                mesh = draft.meshes[replicated[split_buffer(item.writes[0])[1]].mesh]
                sent = 8 * draft.frames[item.frame].count * (mesh.size - 1) if isinstance(item, Draw) else 0
                out.append(replace(item, mesh=mesh.id, bytes=sent))
                continue
            if isinstance(item, Transfer) and item.dst in replicated:  # of an update
                out.append(replace(item, mesh=_ends(draft, item).id))
                continue
            if isinstance(item, Event) and _collects_in_full(item, divided):  # not if nobody needs it
                out += [replace(item, mesh=replicated[item.dst].mesh)] if item.dst in replicated else []
                continue
            out.append(item)
            if isinstance(item, Event) and makes_rows(item):
                out += [_exchange(draft, item, spread) for spread in _exchanges(item, lengths_in, replicated)]
        return tuple(out)

    return replace(draft, body=each_block(each_block(draft.body, insert), _with_collects))


def _with_collects(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Each loop names what its body collects, now that it is known."""
    return tuple(replace(i, collects=tuple(b for e in i.body if isinstance(e, Collect) for b in e.writes))
                 if isinstance(i, Loop) else i for i in items)


def _collects_in_full(e: Event, divided: Mapping[str, Spread]) -> TypeGuard[Collect]:
    """Whether it collects what every rank that needs it holds in full. divided: the spreads from before this pass,
    which adds those of what is held in full."""
    return isinstance(e, Collect) and e.dst not in divided


def _exchanges(e: Generate | Derive, lengths_in: LengthsSpreads, replicated: Mapping[str, Spread]) -> list[Spread]:
    """The spreads of the lengths of what an event makes, those ahead of the step first."""
    ids = dict.fromkeys(lengths_in.id(e.frame, ahead) for ahead in (e.ahead, 0))
    return [replicated[id] for id in ids if id in replicated]


def _ranks_of_replicated(draft: Draft, lengths_in: LengthsSpreads) -> dict[str, Ranks]:
    """Id of each spread of granularity "all" that has no record yet -> the ranks that must hold what is in it."""
    touched: dict[str, Ranks] = defaultdict(Ranks)
    values = draft.values
    every = tuple(events(draft.body))
    ahead = {f for e in every if e.ahead > 0 for f in frames_with_needed_lengths(draft, e, values)}
    in_step = {f for e in every if e.ahead <= 0 for f in frames_with_needed_lengths(draft, e, values)}
    for e in every:
        if isinstance(e, Fetch | Sample):
            touched[split_buffer(e.writes[0])[1]]  # a batch that nobody reads is still fetched somewhere
        if makes_rows(e) and e.ahead > 0 and e.frame in ahead:
            touched[lengths_in.id(e.frame, e.ahead)] |= draft.ranks(e.mesh)
        if makes_rows(e) and (e.ahead <= 0 or e.frame not in ahead - in_step):
            touched[lengths_in.id(e.frame)] |= draft.ranks(e.mesh)
        if not _collects_in_full(e, draft.spreads) and not isinstance(e, Fetch | RowStates):
            for frame in frames_with_needed_lengths(draft, e, values):
                touched[lengths_in.id(frame, e.ahead)] |= draft.ranks(e.mesh)
            for buffer in e.reads:
                right = split_buffer(buffer)[1]
                if right not in draft.spreads and right not in draft.layouts:
                    touched[right] |= draft.ranks(e.mesh)
    sources: dict[str, list[str]] = defaultdict(list)
    for e in every:
        if isinstance(e, Fetch | Draw | Lookup | Update):
            spreads = (split_buffer(b)[1] for b in (*e.reads, *e.writes))
            sources[e.data] += [id for id in spreads if id not in draft.spreads]
    before: dict[str, Ranks] = {}
    while before != touched:
        before = dict(touched)
        _spread_further(draft, every, sources, lengths_in, touched)
    return {id: ranks or Ranks.one(0) for id, ranks in touched.items()}


def _spread_further(draft: Draft, every: Sequence[Event], sources: Mapping[str, Sequence[str]],
                    lengths_in: LengthsSpreads, touched: dict[str, Ranks]) -> None:
    """Adds to `touched` what follows from it. sources: data source -> the spreads of what its ranks hold in full."""
    for e in every:
        if _collects_in_full(e, draft.spreads) and touched.get(e.dst):
            touched[e.src] |= touched[e.dst]  # who needs all of a collection needs each iteration's part
        if isinstance(e, Transfer) and e.dst not in draft.spreads:  # who gets rows knows how they are divided
            for frame in frames_with_needed_lengths(draft, e, draft.values):
                touched[lengths_in.id(frame, e.ahead)] |= touched[e.dst]
    for ids in sources.values():  # who reads a source takes part in each of its fetches, to know which batch is next
        together = union(touched[id] for id in ids)
        for id in ids:
            touched[id] = together or Ranks.one(0)


def _ends(draft: Draft, e: Transfer) -> Mesh:
    return union_of(draft, (draft.spreads[e.src].mesh, draft.spreads[e.dst].mesh))


def _mesh(draft: Draft, spread: Spread, e: Generate | Derive) -> Mesh:
    return mesh_of_set(draft.ranks(spread.mesh) | draft.ranks(e.mesh))


def _exchange(draft: Draft, e: Generate | Derive, replicated: Spread) -> Event:
    mesh = _mesh(draft, replicated, e)
    spread, frame = draft.spreads[e.spread], draft.frames[e.frame]
    layout = draft.layouts[spread.layout]
    ranks_with_row = layout.tp * layout.pp * layout.cp  # the ranks of one dp rank hold its rows already
    lacking = frame.count * (mesh.size - ranks_with_row)
    return Lengths(id=0, mesh=mesh.id, reads=(f"{e.frame}.tokens@{e.spread}",),
                   writes=(f"{e.frame}.lengths@{replicated.id}",), at=e.at,
                   because=f"the rows of {draft.labels.name(e.frame)} are divided by length", bytes=16 * lacking,
                   frame=e.frame, spread=e.spread)


def check_lengths(draft: Draft) -> None:
    """Every buffer is in a spread or layout of the draft's tables."""
    for e in events(draft.body):
        for buffer in (*e.reads, *e.writes):
            right = split_buffer(buffer)[1]
            if right not in draft.spreads and right not in draft.layouts:
                raise internal_error(f"{e.called} uses {buffer}, which is in no spread or layout", "pass lengths")
