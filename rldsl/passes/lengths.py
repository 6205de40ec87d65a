"""Lengths: who must know how long each row is, and the exchange that tells them.

In: a draft with all transfers. Out: the same with a Lengths event after each generate, and each derive that makes rows,
over every rank that divides or cuts that frame's rows, and with the mesh of each fetch: all ranks that read what it
writes or need its lengths. With a lag there may be two: one for those that need the lengths ahead of the step, one in
the step. Where a loop runs ahead, its ranks alone exchange lengths and know the condition that ends it; what it has
collected is exchanged after it, with those that work on it in its step.
Invariant: wherever rows are divided by tokens, the lengths are there, and every spread and layout that a buffer names
is in the draft's tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeGuard

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, LengthsSpreads, each_block, events, frames_with_needed_lengths, loops, makes_rows
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
    ahead_of,
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
        elif isinstance(e, Collect) and (found := _after_collecting(draft, e, lengths_in, replicated)):
            draft = draft.with_meshes(union_of(draft, (s.mesh for s in found)))

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
            if isinstance(item, Loop):
                out += [_exchange_collected(draft, e, *found) for e in item.body if isinstance(e, Collect)
                        if (found := _after_collecting(draft, e, lengths_in, replicated))]
        return tuple(out)

    return _with_conditions(replace(draft, body=each_block(each_block(draft.body, insert), _with_collects)))


def _after_collecting(draft: Draft, e: Collect, lengths_in: LengthsSpreads,
                      replicated: Mapping[str, Spread]) -> tuple[Spread, Spread] | None:
    """The spreads of the lengths of what a loop that runs ahead collects, ahead of the step and in it; None where it
    does not collect lengths, or all know them who need them in the step."""
    ids = lengths_in.id(e.into, e.ahead), lengths_in.id(e.into)
    if e.dst != ids[0] or ids[0] == ids[1] or ids[1] not in replicated:
        return None
    known, wanted = (replicated[id] for id in ids)
    return None if draft.ranks(wanted.mesh) <= draft.ranks(known.mesh) else (known, wanted)


def _exchange_collected(draft: Draft, e: Collect, known: Spread, wanted: Spread) -> Event:
    """known: the spread of the ranks of the loop; wanted: of those that work on the rows in their step."""
    mesh, frame = union_of(draft, (known.mesh, wanted.mesh)), draft.frames[e.into]
    return Lengths(id=0, mesh=mesh.id, reads=(f"{e.into}.lengths@{known.id}",),
                   writes=(f"{e.into}.lengths@{wanted.id}",), at=e.at, because=e.because,
                   bytes=16 * frame.count * (mesh.size - 1), frame=e.into, spread=known.id)


def _conditions(draft: Draft) -> list[tuple[Loop, tuple[Event, ...]]]:
    """Each loop that runs ahead and ends on a condition, with the events that bring it to the ranks of the loop."""
    return [(x, tuple(e for e in events(x.body) if any(split_buffer(b)[1] == split_buffer(x.until)[1]
                                                       for b in e.writes)))
            for x in loops(draft.body) if x.until and ahead_of(x)]


def _ranks_of_loop(draft: Draft, loop: Loop, of_condition: Sequence[Event],
                   touched: Mapping[str, Ranks] | None) -> Ranks:
    """The ranks that have something to do in a loop besides knowing its condition. touched: those of what is held in
    full; None if events and spreads have their meshes."""
    own = [e for e in events(loop.body) if not any(e is x for x in of_condition)]
    if touched is None:
        return union(draft.ranks(e.mesh) for e in own)
    in_full = [e for e in own if isinstance(e, Fetch | RowStates) or _collects_in_full(e, draft.spreads)]
    spreads = {split_buffer(b)[1] for e in own for b in (*e.reads, *e.writes)}
    return union((*(draft.ranks(e.mesh) for e in own if e not in in_full),
                  *(touched[id] for id in sorted(spreads) if id in touched)))


def _with_conditions(draft: Draft) -> Draft:
    """The condition of each loop that runs ahead is known to the loop's ranks, now that these are known."""
    for loop, of_condition in _conditions(draft):
        id, ranks = split_buffer(loop.until)[1], _ranks_of_loop(draft, loop, of_condition, None)
        draft = draft.with_meshes(mesh_of_set(ranks)).with_spreads(
            replace(draft.spreads[id], mesh=mesh_of_set(ranks).id))
        new: dict[Event, tuple[Event, ...]] = {}
        same: dict[str, str] = {}  # buffer -> the one that its ranks, which are the same, hold already
        for e in of_condition:
            if isinstance(e, Transfer) and replace(draft.spreads[e.src], id=id) == draft.spreads[id]:
                new[e], same = (), same | dict(zip(e.writes, e.reads, strict=True))
            elif isinstance(e, Transfer):
                mesh, (value,) = _ends(draft, e), e.values
                draft, ends = draft.with_meshes(mesh), [draft.ranks(draft.spreads[x].mesh) for x in (e.src, e.dst)]
                new[e] = (replace(e, mesh=mesh.id, bytes=8 * len(ends[1] - ends[0]),
                                  because=f"{draft.labels.name(value)} decides whether the loop continues"),)
            else:
                reads = tuple(same.get(b, b) for b in e.reads)
                new[e] = (replace(e, mesh=draft.spreads[id].mesh, reads=reads),)
        draft = replace(draft, body=each_block(draft.body, partial(_replaced, new)))
    return draft


def _replaced(new: Mapping[Event, tuple[Event, ...]], items: tuple[Item, ...]) -> tuple[Item, ...]:
    return tuple(x for i in items for x in (new.get(i, (i,)) if isinstance(i, Event) else (i,)))


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
    values, conditions = draft.values, _conditions(draft)
    every = tuple(events(draft.body))
    of_loops = {e.frame for loop in loops(draft.body) if ahead_of(loop) for e in events(loop.body) if makes_rows(e)}
    ahead = {f for e in every if e.ahead > 0 for f in frames_with_needed_lengths(draft, e, values)} | of_loops
    in_step = {f for e in every if e.ahead <= 0 for f in frames_with_needed_lengths(draft, e, values)}
    for e in every:
        if isinstance(e, Fetch | Sample):
            touched[split_buffer(e.writes[0])[1]]  # a batch that nobody reads is still fetched somewhere
        if makes_rows(e) and e.ahead > 0 and e.frame in ahead:
            touched[lengths_in.id(e.frame, e.ahead)] |= draft.ranks(e.mesh)
        if makes_rows(e) and (e.ahead <= 0 or e.frame not in ahead - in_step):
            touched[lengths_in.id(e.frame)] |= draft.ranks(e.mesh)
        if not _collects_in_full(e, draft.spreads) and not isinstance(e, Fetch | RowStates) and not (
                any(e is x for _, of_condition in conditions for x in of_condition)):
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
    makers = {e.frame: draft.ranks(e.mesh) for e in every if makes_rows(e)}
    before: dict[str, Ranks] = {}
    while before != touched:
        before = dict(touched)
        _spread_further(draft, every, sources, lengths_in, touched, makers)
        for loop, of_condition in conditions:
            ranks = _ranks_of_loop(draft, loop, of_condition, touched)
            for frame in (f for e in of_condition for f in frames_with_needed_lengths(draft, e, values)):
                touched[lengths_in.id(frame, ahead_of(loop))] |= ranks
    return {id: ranks or Ranks.one(0) for id, ranks in touched.items()}


def _spread_further(draft: Draft, every: Sequence[Event], sources: Mapping[str, Sequence[str]],
                    lengths_in: LengthsSpreads, touched: dict[str, Ranks], makers: Mapping[str, Ranks]) -> None:
    """Adds to `touched` what follows from it. sources: data source -> the spreads of what its ranks hold in full.
    makers: frame -> the ranks that make its rows."""
    for e in every:
        if isinstance(e, Collect) and e.ahead > 0 and touched.get(in_step := lengths_in.id(e.into)) and \
                e.dst == (of_loop := lengths_in.id(e.into, e.ahead)) != in_step:  # equal for rows of data
            touched[of_loop] |= makers[e.frame]  # somebody in the loop knows what others need after it
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
                raise internal_error(f"{e.display_name} uses {buffer}, which is in no spread or layout", "pass lengths")
