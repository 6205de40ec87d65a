"""The plan under construction, which every pass takes and returns, and how to walk it.

In: a `PlacedGraph`. Out: a `Draft`: events before the loop (`setup`) and in a step (`body`), with ids made of content.
Invariant: every buffer of an event is `value@spread` or `model@layout`, with the right side in the draft's tables from
the pass `lengths` on. Before it, spreads of frames that are held in full (`replicated_spread_id`) have an id and no
record. Event ids are 0 until `emit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from rldsl.placement.model import PlacedGraph, mesh_of_set
from rldsl.plan.events import Collect, Derive, Event, Fetch, Generate, Item, Lengths, Loop, Sample, When, split_buffer
from rldsl.plan.model import Layout, Mesh, ReplayBuffer, Spread, State, Value
from rldsl.plan.naming import Labels
from rldsl.plan.references import Reference, Role, named, references
from rldsl.plan.spaces import IndexedFrame
from rldsl.sharding.rank_sets import Ranks
from rldsl.sharding.rank_sets import union as union_of_sets


@dataclass(frozen=True, slots=True)
class Draft:
    """The program between passes: the placed graph, its events so far, and the tables that they refer to. The tables
    are keyed by id and never changed in place."""

    placed: PlacedGraph  # the graph with its places
    body: tuple[Item, ...] = ()  # of a step
    setup: tuple[Event, ...] = ()  # before the loop over steps
    meshes: Mapping[str, Mesh] = field(default_factory=dict)  # by id
    layouts: Mapping[str, Layout] = field(default_factory=dict)  # by id
    spreads: Mapping[str, Spread] = field(default_factory=dict)  # by id
    states: tuple[State, ...] = ()  # values that persist over steps
    buffers: tuple[ReplayBuffer, ...] = ()  # rows that persist over steps
    # whether reallocs state bytes, messages and digest; without, there is an estimate of memory but no plan
    sized: bool = True

    @property
    def lasting(self) -> frozenset[str]:
        """The buffers that live through the whole run, besides parameters."""
        kept: tuple[State | ReplayBuffer, ...] = (*self.states, *self.buffers)
        return frozenset(f"{x.value}@{x.spread}" for x in kept)

    @property
    def stops_on(self) -> str:
        """The buffer that ends the run where it is true, which the step loop reads and frees; "" if nothing does."""
        stop = self.placed.graph.stop
        return next((b for e in events(self.body) for b in e.writes if stop and split_buffer(b)[0] == stop), "")

    @property
    def frames(self) -> dict[str, IndexedFrame]:
        return {f.id: f for f in self.placed.graph.frames}

    @property
    def values(self) -> dict[str, Value]:
        return {v.id: v for v in self.placed.graph.values}

    @property
    def labels(self) -> Labels:
        """What reasons call values and frames."""
        return Labels.of(self.placed.graph.values, self.placed.graph.frames)

    def ranks(self, mesh: str) -> Ranks:
        return Ranks.of_mesh(self.meshes[mesh])

    def with_meshes(self, *meshes: Mesh) -> Draft:
        return replace(self, meshes={**self.meshes, **{m.id: m for m in meshes}})

    def with_spreads(self, *spreads: Spread) -> Draft:
        return replace(self, spreads={**self.spreads, **{s.id: s for s in spreads}})


def events(items: Iterable[Item]) -> Iterator[Event]:
    """Every event, those of blocks too, in order."""
    for item in items:
        if isinstance(item, When | Loop):
            yield from events(item.body)
        else:
            yield item


def loops(items: Iterable[Item]) -> Iterator[Loop]:
    """Every loop, those inside others too."""
    for item in items:
        if isinstance(item, When | Loop):
            yield from (item,) if isinstance(item, Loop) else ()
            yield from loops(item.body)


def each_block(items: tuple[Item, ...], change: Callable[[tuple[Item, ...]], tuple[Item, ...]]) -> tuple[Item, ...]:
    """`change` applied to every block, inner ones first, then to the whole."""
    return change(tuple(replace(i, body=each_block(i.body, change)) if isinstance(i, When | Loop) else i
                        for i in items))


def union(draft: Draft, meshes: Iterable[str]) -> Mesh:
    """The mesh of all ranks of some meshes."""
    return mesh_of_set(union_of_sets(draft.ranks(m) for m in set(meshes)))


def frames_with_needed_lengths(draft: Draft, event: Event, values: Mapping[str, Value]) -> tuple[str, ...]:
    """The frames whose lengths every participant of `event` needs: to divide rows, or to cut ragged values into rows.
    values: those of the draft, by id."""
    if not event.traits.needs_lengths_of:
        return ()
    frames = [f for r in named(event, *event.traits.needs_lengths_of) if (f := _frame(r, values))]
    if isinstance(event, Derive) and event.makes_rows:
        frames.remove(event.frame)
    spreads = [r.id for r in references(event) if r.role is Role.SPREAD]
    known = draft.frames
    moved = [values[r.id].frame for r in named(event, *event.traits.needs_lengths_of) if r.role is Role.VALUE]
    frames += [known[f].present_in for f in moved if f and known[f].present_in]
    for id in spreads:
        spread = draft.spreads.get(id)
        if spread is not None and spread.granularity != "all" and spread.balance_by != "slot":  # slots are always there
            frames += spread.frames if spread.balance_by == "tokens" else ()
            frames += [known[f].present_in for f in spread.frames if known[f].present_in]
    return tuple(dict.fromkeys(frames))


def _frame(reference: Reference, values: Mapping[str, Value]) -> str:
    """A frame, or the one of a ragged value; "" for a value that has a fixed number of entries."""
    if reference.role is Role.FRAME:
        return str(reference.id)
    value = values[reference.id]
    return value.frame if value.ragged else ""


def replicated_spread_id(name: str) -> str:
    """The id of the spread in which every rank that needs it holds all rows of `name`: a row space (what a fetch
    writes), a frame (its lengths), or "ranks MESH" (for every rank of a mesh, rows or not). `lengths` adds the spread
    itself, once it is known which ranks these are; that of a mesh exists from the start."""
    return f"all {name}"


def ahead_spread_id(frame: str) -> str:
    """The id of the spread in which ranks hold the lengths of a frame ahead of its step."""
    return replicated_spread_id(f"{frame} ahead")


def loop_spread_id(loop: str) -> str:
    """The id of the spread in which the ranks of a loop that runs ahead hold the condition that ends it."""
    return replicated_spread_id(f"ranks of {loop}")


def row_states_spread_id(data: str) -> str:
    """The id of the spread in which every rank that fetches from a source holds the states of its rows."""
    return replicated_spread_id(f"rows of {data}")


@dataclass(frozen=True, slots=True)
class LengthsSpreads:
    """The spreads in which ranks hold the lengths (and fetched values) of frames. What is made of rows before their own
    step has a separate exchange, so that ranks that only train do not wait for rows of a later step."""

    row_spaces: Mapping[str, str]  # fetched or sampled frame, or what is collected of one -> its row space
    made_ahead: frozenset[str]  # the frames whose rows are made ahead of their step
    # those of them that a loop collects and all ranks know that work on them, so that there is no other exchange
    known_ahead: frozenset[str] = frozenset()

    @staticmethod
    def of(draft: Draft) -> LengthsSpreads:
        own, frames = tuple(events(draft.body)), draft.frames
        fetched = {f for e in own if isinstance(e, Fetch | Sample) for f in e.new_rows}
        into = {e.into: e.frame for e in own if isinstance(e, Collect)}
        ahead = {e.into if isinstance(e, Collect) else e.frame for e in own
                 if e.ahead > 0 and (isinstance(e, Collect) or makes_rows(e))}
        exchanged = {e.frame for e in own if isinstance(e, Lengths)}
        return LengthsSpreads({f: x.row_space for f, x in frames.items() if into.get(f, f) in fetched},
                              frozenset(ahead),
                              frozenset(f for f in ahead & into.keys() - exchanged
                                        if ahead_spread_id(f) in draft.spreads))

    def id(self, frame: str, ahead: int = 0) -> str:
        """The spread in which an event that runs so far ahead finds the lengths of a frame."""
        if frame in self.row_spaces:
            return replicated_spread_id(self.row_spaces[frame])
        early = frame in self.known_ahead or ahead > 0 and frame in self.made_ahead
        return (ahead_spread_id if early else replicated_spread_id)(frame)


def makes_rows(e: Event) -> TypeGuard[Generate | Derive]:
    """Whether an exchange of lengths follows an event."""
    return isinstance(e, Generate) or isinstance(e, Derive) and e.makes_rows


def uses(draft: Draft, event: Event, values: Mapping[str, Value], lengths_in: LengthsSpreads) -> tuple[str, ...]:
    """All buffers that an event needs: what it reads, and the lengths that divide its rows."""
    needed = frames_with_needed_lengths(draft, event, values)
    return (*event.reads, *(f"{f}.lengths@{lengths_in.id(f, event.ahead)}" for f in needed))
