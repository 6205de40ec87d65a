"""Records name only what exists, once each, and are well formed by themselves.

In: tables. Out: diagnostics RL0610 (unknown), RL0611 (declared twice), RL0612 (malformed record; what needs no other
record is in `records.py`). All further checks rely on these two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, assert_never

from rldsl.diag import Diagnostic
from rldsl.plan.events import Event, Item, Loop, When, split_buffer
from rldsl.plan.model import MAX_RANKS, Layout, Mesh, Model, Spread
from rldsl.plan.references import Role, references
from rldsl.verify import adapters, spaces
from rldsl.verify.tables import Tables, name, problem


def check_references(t: Tables) -> Iterator[Diagnostic]:
    yield from _unique(t)
    yield from _header(t)
    for mesh in t.plan.meshes:
        yield from _mesh(mesh, t.plan.header.world)
    for layout in t.plan.layouts:
        yield from _layout(t, layout)
    for spread in t.plan.spreads:
        yield from _spread(t, spread)
    for model in t.plan.models:
        yield from _model(t, model)
    yield from spaces.check_spaces(t)
    yield from _values(t)
    yield from _blocks(t, t.plan.body, inside=False)
    for event, _ in t.events:
        yield from _event(t, event)


def _unique(t: Tables) -> Iterator[Diagnostic]:
    p = t.plan
    loops = [x.id for x in _loops(p.body)]
    for kind, ids in (
        ("mesh", [x.id for x in p.meshes]),
        ("layout or spread", [*(x.id for x in p.layouts), *(x.id for x in p.spreads)]),
        ("model", [x.name for x in p.models]),
        ("data source", [x.name for x in p.data]),
        ("space", [x.id for x in p.spaces]),
        ("frame", [x.id for x in p.frames]),
        ("value", [x.id for x in p.values]),
        ("function", [x.id for x in p.functions]),
        ("program", [x.id for x in p.programs]),
        ("group", [x.id for x in p.groups]),
        ("state", [x.value for x in p.states]),
        ("replay buffer", [x.value for x in p.buffers]),
        ("loop", loops),
    ):
        for id, count in Counter(ids).items():
            if count > 1:
                yield _bad("RL0611", f"{kind} {id} is declared {count} times")
            if not id or "@" in id:
                yield _bad("RL0612", f"{kind} has the id {id!r}")
    first: dict[int, Event] = {}
    for event, _ in t.events:
        if event.id in first:
            yield problem("RL0611", f"two events have the id {event.id}", first[event.id], event)
        first.setdefault(event.id, event)


def _header(t: Tables) -> Iterator[Diagnostic]:
    h = t.plan.header
    if not 1 <= h.world <= MAX_RANKS or not 1 <= h.devices_per_node <= h.world or h.steps < 0:
        yield _bad("RL0612", f"the header has world {h.world}, devices per node {h.devices_per_node}, steps {h.steps}")


def _mesh(mesh: Mesh, world: int) -> Iterator[Diagnostic]:
    if not mesh.ranks or any(not 0 <= a < b <= world for a, b in mesh.ranks):
        yield _bad("RL0612", f"mesh {mesh.id} {mesh.ranks} has ranks outside the world of {world} ranks")
    elif any(stop > start for (_, stop), (start, _) in pairwise(sorted(mesh.ranks))):
        yield _bad("RL0612", f"mesh {mesh.id} contains a rank twice: {mesh.ranks}")


def _layout(t: Tables, x: Layout) -> Iterator[Diagnostic]:
    degrees = (x.dp, x.tp, x.pp, x.cp)
    if x.mesh not in t.meshes:
        yield _unknown("mesh", x.mesh, f"layout {x.id}")
    elif min(degrees) < 1 or prod(degrees) != len(t.ranks[x.mesh]):
        yield _bad(
            "RL0612",
            f"layout {x.id}: dp={x.dp} tp={x.tp} pp={x.pp} cp={x.cp} do not fill mesh {x.mesh} of "
            f"{len(t.ranks[x.mesh])} ranks",
        )


def _spread(t: Tables, s: Spread) -> Iterator[Diagnostic]:
    where = f"spread {s.id}"
    if s.mesh not in t.meshes:
        yield _unknown("mesh", s.mesh, where)
    if (s.granularity == "all") != (s.layout == ""):
        yield _bad("RL0612", f"{where}: unit {s.granularity} with layout {s.layout!r}")
    elif s.layout and s.layout not in t.layouts:
        yield _unknown("layout", s.layout, where)
    elif s.layout and t.ranks.get(s.mesh) != t.ranks.get(t.layouts[s.layout].mesh):
        yield _bad("RL0612", f"{where} is on mesh {s.mesh}, but its layout {s.layout} is on another mesh")
    if s.minibatches < 1 or s.epochs < 1 or s.call < 0 or s.minibatch_tokens < 0:
        yield _bad("RL0612", f"{where}: minibatches {s.minibatches} of {s.minibatch_tokens} tokens, epochs {s.epochs}, "
                             f"call {s.call}")
    frames = [t.frames[f] for f in s.frames if f in t.frames]
    yield from (_unknown("frame", f, where) for f in s.frames if f not in t.frames)
    spaces = {f.prompt_space if s.granularity == "prompt" else f.row_space for f in frames}
    if s.granularity != "all" and len(spaces) > 1:
        yield _bad("RL0612", f"{where} divides frames that share no {s.granularity}s: {', '.join(s.frames)}")


def _model(t: Tables, m: Model) -> Iterator[Diagnostic]:
    where = f"model {m.name}"
    if m.train_layout and m.train_layout not in t.layouts:
        yield _unknown("layout", m.train_layout, where)
    if m.ema_layout and m.ema_layout not in t.layouts:
        yield _unknown("layout", m.ema_layout, where)
    if m.ema_layout and not m.updated_from:
        yield _bad("RL0612", f"{where} keeps an average under {m.ema_layout}, but is not updated from another model")
    if bool(m.train_layout) != (m.optimizer is not None):
        what = "a training layout but no optimizer" if m.train_layout else "an optimizer but no training layout"
        yield _bad("RL0612", f"{where} has {what}")
    yield from (_unknown("model", x, where) for x in dict.fromkeys(m.updated_from) if x not in t.models)
    if m.train_layout and m.updated_from:
        yield _bad("RL0612", f"{where} is trained and also updated from {m.updated_from[0]}")
    if len({p.name for p in (*m.params, *m.base)}) != len(m.params) + len(m.base):
        yield _bad("RL0611", f"{where} lists a parameter twice")
    if bool(m.base) != (m.lora is not None):
        yield _bad("RL0612", f"{where} has " + ("a base but no adapters" if m.base else "adapters but no base"))
    elif m.lora is not None:
        yield from adapters.check_adapters(m, m.lora)


def _values(t: Tables) -> Iterator[Diagnostic]:
    for f in t.plan.frames:
        if f.data not in t.data:
            yield _unknown("data source", f.data, f"frame {f.id}")
        yield from (_unknown("frame", x, f"frame {f.id}") for x in (f.selected_from, f.picked_from, f.present_in)
                    if x and x not in t.frames)
        if _selects_from_itself(t, f.id):
            yield _bad("RL0612", f"frame {f.id} is derived from itself")
    for s in t.plan.states:
        v = t.values.get(s.value)
        if v is None or v.level != "batch" or v.dtype != "f32" or (v.extent == "table") != bool(s.data):
            yield _bad("RL0612", f"state {s.value} is not a number at the batch level, or per row of {s.data}")
        if s.data and s.data not in t.data:
            yield _unknown("data source", s.data, f"state {s.value}")
        if s.spread not in t.spreads:
            yield _unknown("spread", s.spread, f"state {s.value}")
        elif t.spreads[s.spread].granularity != "all":
            yield _bad("RL0612", f"state {s.value} is in spread {s.spread}, which divides rows")
    for b in t.plan.buffers:
        v = t.values.get(b.value)
        if v is None or v.extent != "stored" or v.frame:
            yield _bad("RL0612", f"replay buffer {b.value} is no value that stands for stored rows")
        if b.data not in t.data:
            yield _unknown("data source", b.data, f"replay buffer {b.value}")
        if b.spread not in t.spreads:
            yield _unknown("spread", b.spread, f"replay buffer {b.value}")
        elif t.spreads[b.spread].granularity != "all":
            yield _bad("RL0612", f"replay buffer {b.value} is in spread {b.spread}, which divides rows")
    for v in t.plan.values:
        if v.frame not in t.frames and (v.frame or v.extent not in ("batch", "table", "stored", "array")):
            yield _unknown("frame", v.frame, f"value {v.id}")


def _selects_from_itself(t: Tables, frame: str) -> bool:
    """Whether the frames that a frame is made from lead back to one of them."""
    seen: set[str] = set()
    while frame in t.frames and frame not in seen:
        seen.add(frame)
        f = t.frames[frame]
        frame = f.selected_from or f.picked_from or (f.present_in if f.present_in != frame else "")
    return bool(frame) and frame in t.frames


def _loops(items: Sequence[Item]) -> Iterator[Loop]:
    for item in items:
        if isinstance(item, Loop | When):
            yield from ([item] if isinstance(item, Loop) else [])
            yield from _loops(item.body)


def _blocks(t: Tables, items: Sequence[Item], inside: bool) -> Iterator[Diagnostic]:
    for item in items:
        if isinstance(item, Loop):
            if item.trips < 0:
                yield _bad("RL0612", f"loop {item.id} runs {item.trips} times")
            for buffer in (*item.collects, *filter(None, (item.until,))):
                left, right = split_buffer(buffer)
                if left not in t.values or right not in t.spreads:
                    yield _bad("RL0610", f"loop {item.id} refers to an unknown buffer {buffer!r}")
            if item.over and item.over not in t.data:
                yield _unknown("data source", item.over, f"loop {item.id}")
            yield from _blocks(t, item.body, True)
        elif isinstance(item, When):
            if item.period < 1 or item.after < 0 or item.first < 0 or not inside:
                yield _bad("RL0612", f"{item.head}: expected a period of at least 1, inside a loop")
            yield from _blocks(t, item.body, inside)


def _event(t: Tables, e: Event) -> Iterator[Diagnostic]:
    if e.bytes < -1:
        yield problem("RL0612", f"{name(e)} moves {e.bytes} bytes", e)
    for field, role, id in references(e):
        if not _exists(t, role, id):
            if role is Role.RANK:
                yield problem("RL0610", f"{name(e)} has rank {id} of {t.plan.header.world} as its {field!r}", e)
            else:
                yield problem("RL0610", f"{name(e)} refers to an unknown {role.value} {id!r}", e)


def _exists(t: Tables, role: Role, id: Any) -> bool:
    match role:
        case Role.MESH:
            return id in t.meshes
        case Role.LAYOUT:
            return id in t.layouts
        case Role.SPREAD:
            return id in t.spreads
        case Role.MODEL:
            return id in t.models
        case Role.DATA:
            return id in t.data
        case Role.FRAME:
            return id in t.frames
        case Role.VALUE:
            return id in t.values
        case Role.PROGRAM:
            return id in t.programs
        case Role.BUFFER:
            left, right = split_buffer(id)
            return left in t.values and right in t.spreads or left in t.models and right in t.layouts
        case Role.RANK:
            return bool(0 <= id < t.plan.header.world)
        case _:
            assert_never(role)


def _unknown(kind: str, id: str, where: str) -> Diagnostic:
    return _bad("RL0610", f"{where} refers to an unknown {kind} {id!r}")


def _bad(code: str, title: str) -> Diagnostic:
    return problem(code, title)
