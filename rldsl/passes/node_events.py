"""Node events: the event of each node of the graph, in program order, in the node's own spread.

In: a `PlacedGraph`. Out: a `Draft` whose events read each value in their own spread (or, for what a fetch writes, in
the spread that all its readers hold in full), whether or not anything brings it there: that is the next pass's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

from rldsl.diag import fail, internal_error
from rldsl.graph import model as g
from rldsl.passes.draft import Draft, ahead_spread_id, loop_spread_id, replicated_spread_id, row_states_spread_id
from rldsl.passes.row_spreads import by_prompts, on_every_rank, spread_of, tokens_per_pass, with_id
from rldsl.passes.run_ahead import steps_ahead
from rldsl.placement.budget import decode_batch_size
from rldsl.placement.model import Call, PlacedGraph, Placement, mesh_of_range, mesh_of_set
from rldsl.placement.reuse import reused_caches
from rldsl.placement.sync import sync_placements
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.events import (
    Collect,
    Compute,
    Derive,
    Draw,
    Event,
    Fetch,
    Generate,
    Infer,
    Item,
    Lookup,
    Loop,
    Realloc,
    Sample,
    Save,
    Store,
    Train,
    Transfer,
    Update,
    When,
    split_buffer,
)
from rldsl.plan.heads import DISTRIBUTION
from rldsl.plan.model import Layout, Mesh, ReplayBuffer, Spread, State, Value
from rldsl.plan.payloads import (
    CollectSpec,
    ComputeSpec,
    DeriveSpec,
    DrawSpec,
    FetchSpec,
    GenerateSpec,
    InferSpec,
    LookupSpec,
    SampleSpec,
    SaveSpec,
    StoreSpec,
    TrainSpec,
    UpdateSpec,
    payload,
)
from rldsl.plan.spaces import IndexedFrame
from rldsl.sharding.rank_sets import Ranks, union


def node_events(placed: PlacedGraph) -> Draft:
    reused = reused_caches(placed.graph, dict(placed.placements))
    kept = tuple(Value(f"{f}.cache", f, "seq", "cache") for f in dict.fromkeys(reused.values()))
    placed = replace(placed, graph=replace(placed.graph, values=(*placed.graph.values, *kept)))
    builder = _EventBuilder(placed, reused)
    body = builder.block(placed.graph.items)
    return Draft(placed, body, (), builder.meshes, builder.layouts, builder.spreads, builder.states(),
                 builder.buffers())


class _EventBuilder:
    def __init__(self, placed: PlacedGraph, reused: Mapping[str, str]):
        """reused: id of a generate that reads an earlier call's KV cache -> the frame of that call."""
        self.reused = reused
        self.placed, self.placements = placed, dict(placed.placements)
        self.train_layouts = {m.name: m.train_layout for m in placed.models}
        self.sync_placements = sync_placements(placed.graph, self.placements, self.train_layouts)  # of models in syncs
        self.written_at: dict[str, str] = {}  # model -> position of what made its version, in program order
        self.head_makers = {n.model: n.id for n in g.nodes(placed.graph.items)
                            if isinstance(n, g.Infer) and n.output_name == DISTRIBUTION}
        self.updated_at: dict[str, str] = {}  # state of rows -> position of its last update, in program order
        self.stored_at: dict[str, str] = {}  # buffer -> position of what added rows last, in program order
        self.layouts: dict[str, Layout] = {}
        self.spreads: dict[str, Spread] = {}
        self.frames = {f.id: f for f in placed.graph.frames}
        self.frame_of = {v.id: v.frame for v in placed.graph.values}
        self.row_states = {s.name: s.data for s in placed.graph.states if s.data}  # state of rows -> its source
        self.replicated: dict[str, str] = {}  # value that every reader holds in full -> id of its spread
        self.made_in: dict[str, str] = {}  # any other value -> id of the spread that it was made in
        ranks = {id: Ranks.of_mesh(placement.mesh) for id, placement in self.placements.items()}
        self.ahead = steps_ahead(placed.graph, ranks)  # of nodes that run ahead of the step loop
        self.num_loops = 0
        self.conditions: dict[str, Spread] = {}  # that end a repeat which runs ahead -> the spread of its ranks
        self.world = mesh_of_range(placed.world)  # also of fetches, until all their readers are known (`lengths.py`)
        self.meshes: dict[str, Mesh] = {self.world.id: self.world}
        self.everywhere = on_every_rank(self.world)  # of states, and of the conditions that end a repeat
        for placement in (*self.placements.values(), *self.sync_placements.values()):
            self.meshes[placement.mesh.id] = placement.mesh
            self.layouts[placement.layout.id] = placement.layout

    def block(self, items: tuple[g.Item, ...]) -> tuple[Item, ...]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, g.When):
                out.append(When(item.period, self.block(item.body), item.after, item.first))
            elif isinstance(item, g.Repeat):
                out.append(Loop(self.new_loop_id(), item.iterations, self.block(item.body)))
            elif isinstance(item, g.Eval):
                name, body = self.new_loop_id(), self.block(item.body)
                collects = tuple(b for e in body if isinstance(e, Collect) for b in e.writes)
                out.append(Loop(name, item.max_iterations, body, collects=collects, over=item.data))
            elif isinstance(item, g.Until):
                out.append(self.until(item))
            elif isinstance(item, g.Collect):
                collected = self.collect(item) if item.into in self.frames else []
                out += (replace(e, ahead=self.ahead.get(item.id, 0)) for e in collected)
            elif isinstance(item, g.Update):
                out += self.update(item)
            else:
                event = self.event(item)
                out.append(replace(event, ahead=self.ahead.get(item.id, 0)))
                self.made_in |= {split_buffer(b)[0]: split_buffer(b)[1] for b in event.writes}
        return tuple(out)

    def until(self, item: g.Until) -> Loop:
        """The condition is known to every rank; if the loop runs ahead, to those of the loop alone, so that others need
        not wait for it. Which these are is not known yet (`lengths.py`)."""
        name = self.new_loop_id()
        if any(n.id in self.ahead for n in g.nodes(item.body)):
            self.conditions[item.condition] = replace(self.everywhere, id=loop_spread_id(name))
        body = self.block(item.body)
        collects = tuple(b for e in body if isinstance(e, Collect) for b in e.writes)
        spread = self.conditions.get(item.condition, self.everywhere)
        return Loop(name, item.max_iterations, body, f"{item.condition}@{spread.id}", collects)

    def new_loop_id(self) -> str:
        self.num_loops += 1
        return f"repeat{self.num_loops}"

    def collect(self, node: g.Collect) -> list[Event]:
        """The events of a collection: of the lengths, of the values that every rank holds in full, and of the rest,
        whose rows stay on the ranks that made them."""
        placement = self.placements[node.id]
        slots = spread_of(node, placement, self.frames)
        into = with_id(replace(slots, frames=(node.into,)))
        old, new = self.frames[node.frame], self.frames[node.into]
        fetched = f"{old.id}.tokens" in self.replicated
        of = ahead_spread_id if node.id in self.ahead else replicated_spread_id
        src, dst = (replicated_spread_id(f.row_space) if fetched else of(f.id) for f in (old, new))
        in_full = tuple((v, w) for v, w in node.values if v in self.replicated)
        divided = tuple((v, w) for v, w in node.values if v not in self.replicated)
        self.replicated |= {w: dst for _, w in in_full}
        self.made_in |= {w: into.id for _, w in divided}
        out: list[Event] = [self._collect(node, ((f"{old.id}.lengths", f"{new.id}.lengths"),), src, dst, self.world.id,
                                          f"the rows of {new.label or new.id} are divided by length")]
        if in_full:
            out.append(self._collect(node, in_full, src, dst, self.world.id))
        if divided:
            self.spreads |= {slots.id: slots, into.id: into}
            out.append(self._collect(node, divided, slots.id, into.id, placement.mesh.id))
        return out

    def _collect(self, node: g.Collect, values: tuple[tuple[str, str], ...], src: str, dst: str, mesh: str,
                 because: str = "") -> Collect:
        writes = tuple(f"{w}@{dst}" for _, w in values)
        return Collect(id=0, mesh=mesh, reads=(*(f"{v}@{src}" for v, _ in values), *writes), writes=writes,
                       at=str(node.span), because=because, src=src, dst=dst,
                       **(payload(node, CollectSpec) | {"values": values}))

    def states(self) -> tuple[State, ...]:
        return tuple(State(s.name, row_states_spread_id(s.data) if s.data else self.everywhere.id, s.initial, s.data)
                     for s in self.placed.graph.states)

    def update(self, node: g.Update) -> list[Event]:
        """The new numbers go to every rank that fetches, each row from its one owner; then each rank writes them. The
        mesh of these ranks is not known yet (`lengths.py`)."""
        new, numbers = node.reads
        src, dst = self.made_in[new], self.replicated[numbers]
        buffer, state = f"{new}@{dst}", self._buffer(node.state, "")
        name = self.frames[node.frame].label or node.frame
        return [Transfer(id=0, mesh=self.spreads[src].mesh, reads=(f"{new}@{src}",), writes=(buffer,),
                         at=str(node.span), because=f"every rank that fetches {name} keeps {node.state}", bytes=-1,
                         values=(new,), src=src, dst=dst),
                self._of_row_states(Update, node, (buffer, f"{numbers}@{dst}", state), (state,), UpdateSpec)]

    def _of_row_states(self, kind: type[Event], node: g.Draw | g.Lookup | g.Update, reads: tuple[str, ...],
                       writes: tuple[str, ...], spec: type) -> Event:
        """An event on states of rows, with the updates that precede it."""
        states = [v for v, _ in map(split_buffer, dict.fromkeys((*reads, *writes))) if v in self.row_states]
        follows = tuple((s, self.updated_at.get(s, "")) for s in dict.fromkeys(states))
        at = str(node.span)
        if isinstance(node, g.Update):
            self.updated_at[node.state] = at
        fields = {"follows": follows, **payload(node, spec)}
        return kind(id=0, mesh=self.world.id, at=at, reads=reads, writes=writes, **fields)

    def buffers(self) -> tuple[ReplayBuffer, ...]:
        graph, frames = self.placed.graph, dict[str, IndexedFrame]()
        for n in g.nodes(graph.items):
            if isinstance(n, g.Store):
                frames.setdefault(n.buffer, self.frames[n.frame])
        return tuple(
            ReplayBuffer(b.name, self.everywhere.id, b.capacity, b.stored.fields, b.stored.data,
                         b.stored.max_prompt_tokens, b.stored.max_response_tokens, b.stored.temperature,
                         frames[b.name].tokenizer)
            for b in graph.buffers if b.stored is not None)

    def store(self, node: g.Store, at: str) -> Event:
        """On every rank: all of them have the rows of a buffer."""
        everywhere, version = self._everywhere(), self.stored_at.get(node.buffer, "")
        self.stored_at[node.buffer] = at
        return Store(id=0, mesh=everywhere.mesh, at=at, version=version,
                     reads=tuple(f"{v}@{self._at(v, everywhere.id)}" for v in node.reads),
                     writes=(f"{node.buffer}@{everywhere.id}",), **payload(node, StoreSpec))

    def sample(self, node: g.Sample, at: str) -> Event:
        """As a fetch: on each rank that reads what it writes (`lengths.py`)."""
        spread_id = replicated_spread_id(self.frames[node.frame].row_space)
        self.replicated |= dict.fromkeys(node.writes, spread_id)
        return Sample(id=0, mesh=self.world.id, at=at, version=self.stored_at.get(node.buffer, ""),
                      reads=tuple(f"{v}@{self._everywhere().id}" for v in node.reads),
                      writes=tuple(f"{v}@{spread_id}" for v in node.writes), **payload(node, SampleSpec))

    def event(self, node: g.Node) -> Event:
        at = str(node.span)
        if isinstance(node, g.Store):
            return self.store(node, at)
        if isinstance(node, g.Sample):
            return self.sample(node, at)
        if isinstance(node, g.Fetch):
            return self.fetch(node, at)
        if isinstance(node, g.Draw | g.Lookup):
            return self.draw_or_lookup(node)
        if isinstance(node, g.Save):
            saved = self._save_layout(node)
            return Save(id=0, mesh=self.layouts[saved].mesh, reads=(f"{node.model}@{saved}",), at=at, layout=saved,
                        **payload(node, SaveSpec))
        if isinstance(node, g.Broadcast):
            return self.broadcast(node, at)
        if isinstance(node, g.Sync):
            return self.sync(node, at)
        placement = self.placements[node.id]
        spread = self._spread(node, placement)
        self.spreads[spread.id] = spread
        reads = tuple(f"{v}@{self._at(v, spread.id)}" for v in node.reads)
        writes = tuple(f"{v}@{spread.id}" for v in node.writes)
        if isinstance(node, g.Derive):
            return Derive(id=0, mesh=spread.mesh, at=at, spread=spread.id, reads=reads, writes=writes,
                          **payload(node, DeriveSpec))
        if isinstance(node, g.Compute):
            return Compute(id=0, mesh=placement.mesh.id, at=at, spread=spread.id, reads=reads, writes=writes,
                           **payload(node, ComputeSpec))
        if isinstance(node, Call):
            return self.call(node, placement, spread, reads, writes)
        raise internal_error(f"no event for {type(node).__name__} {node.id}", "pass node_events")

    def fetch(self, node: g.Fetch, at: str) -> Event:
        """On each rank that reads what it writes (`lengths.py`)."""
        spreads = {v: replicated_spread_id(self.frames[self.frame_of[v]].row_space) for v in node.writes}
        self.replicated |= spreads
        source = replicated_spread_id(self.frames[node.newest or node.frames[0]].row_space)
        return Fetch(id=0, mesh=self.world.id, reads=tuple(f"{v}@{source}" for v in node.reads),
                     writes=tuple(f"{v}@{s}" for v, s in spreads.items()), at=at, **payload(node, FetchSpec))

    def draw_or_lookup(self, node: g.Draw | g.Lookup) -> Event:
        """As a fetch: both are about all rows of the batch."""
        spread_id = replicated_spread_id(self.frames[node.frame].row_space)
        self.replicated |= dict.fromkeys(node.writes, spread_id)
        reads = tuple(self._buffer(v, spread_id) for v in node.reads)
        kind, spec = (Draw, DrawSpec) if isinstance(node, g.Draw) else (Lookup, LookupSpec)
        return self._of_row_states(kind, node, reads, tuple(f"{v}@{spread_id}" for v in node.writes), spec)

    def call(self, node: Call, placement: Placement, spread: Spread, reads: tuple[str, ...], writes: tuple[str, ...]
             ) -> Event:
        """Of a model. It also reads the model's parameters, and perhaps a KV cache or another model's head."""
        copy, layout = f"{node.model}@{placement.layout.id}", placement.layout.id
        common: dict[str, Any] = {"id": 0, "mesh": placement.mesh.id, "at": str(node.span), "spread": spread.id,
                                  "layout": layout}
        match node:
            case g.Generate():
                cache_of = self.reused.get(node.id, "")
                cache = (f"{cache_of}.cache@{spread.id}",) if cache_of else ()
                kept = (f"{node.frame}.cache@{spread.id}",) if node.frame in self.reused.values() else ()
                return Generate(**common, reads=(copy, *reads, *cache), writes=(*writes, *kept), cache_of=cache_of,
                                mbs=decode_batch_size(self.frames[node.frame], placement), waiting=placement.waiting,
                                **payload(node, GenerateSpec))
            case g.Infer():
                return Infer(**common, reads=(copy, *reads), writes=writes, mbs=placement.mbs, mbt=placement.mbt,
                             **payload(node, InferSpec))
            case g.Train():
                self.written_at[node.model] = common["at"]
                heads = tuple(self.placements[self.head_makers[model]].layout.id for _, model in node.heads)
                read = dict.fromkeys(f"{model}@{x}" for (_, model), x in zip(node.heads, heads, strict=True))
                return Train(**common, reads=(copy, *read, *reads), writes=(copy, *writes), mbs=placement.mbs,
                             mbt=tokens_per_pass(node, self.frames, placement.layout, placement.mbt),
                             recompute=placement.recompute, head_layouts=heads, **payload(node, TrainSpec))
        assert_never(node)

    def broadcast(self, node: g.Broadcast, at: str) -> Event:
        """On every rank: all of them use a state, and the condition that ends a repeat. The condition of a repeat that
        runs ahead is on its ranks alone."""
        (value,), (name,) = node.reads, node.writes
        everywhere = self.conditions.get(name) or self._everywhere()
        self.meshes[self.world.id] = self.world
        self.spreads[everywhere.id] = everywhere
        return Compute(id=0, mesh=everywhere.mesh, at=at, reads=(f"{value}@{self._at(value, everywhere.id)}",),
                       writes=(f"{name}@{everywhere.id}",), spread=everywhere.id, program=node.program, frames=(),
                       inputs=((value, value),), outputs=((name, name),))

    def sync(self, node: g.Sync, at: str) -> Event:
        """Between models; the pass `reallocs` finds its moves."""
        src, dst = self.sync_placements[node.source].layout.id, self.sync_placements[node.model].layout.id
        version = self.written_at.get(node.source, "")
        self.written_at[node.model] = at
        mesh = mesh_of_set(union(Ranks.of_mesh(self.meshes[self.layouts[x].mesh]) for x in (src, dst)))
        self.meshes[mesh.id] = mesh
        return Realloc(id=0, mesh=mesh.id, reads=(f"{node.source}@{src}",), writes=(f"{node.model}@{dst}",), at=at,
                       model=node.model, src=src, dst=dst, source=node.source, decay=node.decay, source_version=version)

    def _everywhere(self) -> Spread:
        self.meshes[self.world.id] = self.world
        return self.spreads.setdefault(self.everywhere.id, self.everywhere)

    def _at(self, value: str, spread: str) -> str:
        """The spread in which an event that works on `spread` reads a value."""
        if value in self.row_states:
            return row_states_spread_id(self.row_states[value])
        graph = self.placed.graph
        if value in {*(s.name for s in graph.states), *(b.name for b in graph.buffers)}:
            return self._everywhere().id
        return self.replicated.get(value, spread)

    def _buffer(self, value: str, spread: str) -> str:
        return f"{value}@{self._at(value, spread)}"

    def _spread(self, node: g.Node, placement: Placement) -> Spread:
        """The spread of what the node writes. Rows are derived where their sequences (or values) are; rows that every
        rank holds in full are first divided as for a computation."""
        if node.id in self.reused:  # where the cache is
            return self.spreads[self.made_in[f"{self.reused[node.id]}.cache"]]
        if isinstance(node, g.Derive) and DERIVE_OPS[node.op].calls_python:  # each row on one rank, as in a computation
            return by_prompts(placement, (node.source, *(frame for _, frame in node.given)), self.frames)
        if isinstance(node, g.Derive) and DERIVE_OPS[node.op].several:  # nobody knows the lengths of its rows yet
            return with_id(Spread("", placement.mesh.id, placement.layout.id, (node.frame,), "prompt", "slot"))
        if isinstance(node, g.Derive) and node.parts:  # all parts of a sequence on one rank
            return by_prompts(placement, node.parts, self.frames)
        if isinstance(node, g.Derive):
            made = self.spreads.get(self.made_in.get(node.values[0][0], ""))
            if made is not None and made.granularity != "all" and self._fits(node, made):
                return made
            return with_id(Spread("", placement.mesh.id, placement.layout.id, (node.source,), "prompt", "tokens"))
        return spread_of(node, placement, self.frames)

    def _fits(self, node: g.Derive, spread: Spread) -> bool:
        """Whether each rank has the rows that `node` needs at once: whole prompts, where its rows are made of those."""
        divided, source = self.frames[spread.frames[0]], self.frames[node.source]
        unit = divided.prompt_index if spread.granularity == "prompt" else 0
        return not DERIVE_OPS[node.op].whole_prompts or divided.origins[unit] in source.origins[source.prompt_index:]

    def _save_layout(self, node: g.Save) -> str:
        """The training layout; without one, the layout in which syncs write or read the model, or else the first in
        which it is used."""
        if self.train_layouts[node.model]:
            return self.train_layouts[node.model]
        if node.model in self.sync_placements:
            return self.sync_placements[node.model].layout.id
        for call in g.nodes(self.placed.graph.items):
            if isinstance(call, Call) and call.model == node.model:
                return self.placements[call.id].layout.id
        raise fail("RL0319", f"`{node.model}` is saved, but no call uses it", node.span, "no rank loads this model",
                   help="remove the `save`, or use the model")
