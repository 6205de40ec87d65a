"""The plan: events numbered, equal tables merged and given short ids, classes of ranks.

In: a finished draft. Out: a `Plan`. Invariant: everything that a record names is in a table,
and every table entry is named by something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

from rldsl.graph import model as g
from rldsl.passes.draft import Draft, events
from rldsl.passes.groups import groups
from rldsl.plan.events import Event, Item, Loop, Train, When, aheads_in, split_buffer
from rldsl.plan.model import FORMAT, ROLES, Data, Header, Layout, Mesh, Plan, Spread
from rldsl.plan.projection import rank_classes, times, walk
from rldsl.plan.references import Role, references, renamed
from rldsl.plan.spaces import spaces_of


def emit(draft: Draft, compiler: str) -> Plan:
    """The plan of `draft`, without peaks of memory. compiler: name and version for the header."""
    graph, placed = draft.placed.graph, draft.placed
    every = tuple(events((*draft.setup, *draft.body)))
    names, meshes, layouts, spreads = _tables(draft, every)
    numbers = count()
    rename = _Rename(names)
    setup = tuple(rename.event(e, next(numbers)) for e in draft.setup)
    until = rename.buffer(draft.stops_on) if draft.stops_on else ""
    own = _with_aheads(draft.body) if graph.lag else draft.body
    steps = Loop("steps", graph.steps, rename.block(own, numbers), until, first=1 - graph.lag)
    body: tuple[Item, ...] = (*setup, steps)
    models = tuple(replace(m, train_layout=names.get(m.train_layout, ""),
                           ema_layout=names.get(m.ema_layout, ""), planned_updates=updates(draft, m.name))
                   for m in placed.models)
    used = {r.id for e in every for r in references(e) if r.role is Role.MODEL}
    header = Header(FORMAT, compiler, graph.program, graph.flow, placed.world, placed.devices_per_node, graph.steps,
                    graph.seed, graph.sources, graph.params, placed.memory, graph.lag)
    return Plan(header, meshes, layouts, spreads, tuple(m for m in models if m.name in used), _data(draft),
                spaces_of(graph.frames), tuple(f.record for f in graph.frames), graph.values, graph.functions,
                graph.programs,
                groups(events(body), {x.id: x for x in layouts}, {m.id: m for m in meshes}), body,
                rank_classes(meshes, body, placed.world, {}),
                tuple(replace(s, spread=names[s.spread]) for s in draft.states if s.spread in names),
                tuple(replace(b, spread=names[b.spread]) for b in draft.buffers if b.spread in names))


def _with_aheads(items: Iterable[Item]) -> tuple[Item, ...]:
    """The items of the step loop; each block says by how many steps its events run ahead."""
    return tuple(replace(i, body=_with_aheads(i.body), aheads=aheads_in(i)) if isinstance(i, When) else i
                 for i in items)


def updates(draft: Draft, model: str) -> int:
    """Optimizer steps of `model` in the whole run; of a `repeat ... until` as if it never ended early."""
    steps = Loop("steps", draft.placed.graph.steps, draft.body)
    trains = ((e, times(path)) for e, path in walk((steps,)) if isinstance(e, Train) and e.model == model)
    return sum(count * draft.spreads[e.spread].minibatches * draft.spreads[e.spread].epochs for e, count in trains)


def _data(draft: Draft) -> tuple[Data, ...]:
    tokenizers = dict(draft.placed.tokenizers)
    return tuple(_source(d, tokenizers[d.name]) for d in draft.placed.graph.data)


def _source(d: g.Data, tokenizer: str) -> Data:
    given = dict(d.options)  # of the types that `semantics/options.py` has checked, which mypy cannot see below
    columns = tuple((c, str(given.get(c, c))) for c in ROLES[d.row_format])
    answers = 0 if d.row_format == "prompts" else int(given.get("max_answer_tokens", 0))
    return Data(d.name, d.format, d.path, d.row_format, int(given["batch"]), columns, tokenizer,  # type: ignore[arg-type]
                bool(given.get("shuffle", True)), int(given.get("max_prompt_tokens", 0)), answers, d.numbers,
                given.get("over_long", "truncate"), d.answers, str(given.get("images", "")),  # type: ignore[arg-type]
                int(given.get("max_image_tokens", 0)))


# ------------------------------------------------------------------------------------------------ tables


def _tables(draft: Draft, every: tuple[Event, ...]) -> tuple[dict[str, str], tuple[Mesh, ...], tuple[Layout, ...],
                                                              tuple[Spread, ...]]:
    """Long id -> short id, and the records in the order of first use. Equal spreads become one."""
    ids = [x for e in every for x in _named(e)]
    layouts = {x: draft.layouts[x] for x in dict.fromkeys(ids) if x in draft.layouts}
    spreads = {x: draft.spreads[x] for x in dict.fromkeys(ids) if x in draft.spreads}
    layouts |= {s.layout: draft.layouts[s.layout] for s in spreads.values() if s.layout and s.layout not in layouts}
    used = [*(e.mesh for e in every), *(x.mesh for x in layouts.values()), *(s.mesh for s in spreads.values())]
    meshes = {m: f"m{i}" for i, m in enumerate(sorted(dict.fromkeys(used), key=lambda m: draft.meshes[m].ranks))}
    names = {x: f"L{i}" for i, x in enumerate(layouts)}
    merged: dict[Spread, str] = {}
    for id, s in spreads.items():
        short = replace(s, id="", mesh=meshes[s.mesh], layout=names.get(s.layout, ""))
        names[id] = merged.setdefault(short, f"s{len(merged)}")
    return (names | meshes, tuple(replace(draft.meshes[m], id=short) for m, short in meshes.items()),
            tuple(replace(x, id=names[id], mesh=meshes[x.mesh]) for id, x in layouts.items()),
            tuple(replace(s, id=id) for s, id in merged.items()))


def _named(e: Event) -> list[str]:
    """The layouts and spreads that an event names, those of its own fields before those of its buffers."""
    every = list(references(e))
    return [*(r.id for r in every if r.role in (Role.LAYOUT, Role.SPREAD)),
            *(split_buffer(r.id)[1] for r in every if r.role is Role.BUFFER)]


class _Rename:
    """Short ids for long ones, in every field that holds one."""

    def __init__(self, names: Mapping[str, str]):
        self.names = names
        self.new = {Role.BUFFER: self.buffer, **dict.fromkeys((Role.MESH, Role.LAYOUT, Role.SPREAD), self.id)}

    def id(self, id: str) -> str:
        return self.names[id]

    def buffer(self, buffer: str) -> str:
        left, right = split_buffer(buffer)
        return f"{left}@{self.names[right]}"

    def event(self, e: Event, id: int) -> Event:
        return replace(e, id=id, **renamed(e, self.new))

    def block(self, items: Iterable[Item], numbers: count[int]) -> tuple[Item, ...]:
        return tuple(self.loop(i, numbers) if isinstance(i, Loop)
                     else replace(i, body=self.block(i.body, numbers)) if isinstance(i, When)
                     else self.event(i, next(numbers)) for i in items)

    def loop(self, i: Loop, numbers: count[int]) -> Loop:
        return replace(i, body=self.block(i.body, numbers), **renamed(i, self.new))
