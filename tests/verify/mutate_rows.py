"""Mistakes that a compiler could make with rows, buffers and states of rows: consistent ones, in several records.

In: a plan and a source of random choices. Out: another plan, or None where the plan has nothing of the kind. `Mutator`
changes a field at a time; these change what a pass would get wrong as a whole, so that names still fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.events import (
    Compute,
    Derive,
    Draw,
    Event,
    Free,
    Generate,
    Item,
    Lengths,
    Realloc,
    RowStates,
    Sample,
    Store,
    Train,
)
from rldsl.plan.model import Plan, Space
from rldsl.plan.projection import event_paths
from tests.verify.mutate import edited, projected

T = TypeVar("T")
Operator = Callable[[Plan, random.Random], Plan | None]


def renamed(record: T, names: Mapping[str, str]) -> T:
    """With frames, values and buffers of the old names replaced: "gen" in "gen", "gen.tokens" and "gen.tokens@s1"."""
    if isinstance(record, str):
        for old, new in names.items():
            rest = record.removeprefix(old)
            if rest != record and rest[:1] in ("", ".", "@"):
                return new + rest  # type: ignore[return-value]
        return record
    if isinstance(record, tuple):
        return tuple(renamed(x, names) for x in record)  # type: ignore[return-value]
    if is_dataclass(record):
        kept = ("at", "because", "model", "layout", "spread", "mesh", "src", "dst")
        return replace(record, **{f.name: renamed(getattr(record, f.name), names)  # type: ignore[type-var]
                                  for f in fields(record) if f.name not in kept})
    return record


def _events(plan: Plan, *kinds: type[Event]) -> list[Any]:
    return [e for e, _ in event_paths(plan) if isinstance(e, kinds or Event)]


def _with(plan: Plan, edit: Callable[[Item], tuple[Item, ...] | None]) -> Plan:
    return projected(replace(plan, body=edited(plan.body, edit)))


def _changed(plan: Plan, e: Event, **new: Any) -> Plan:
    return _with(plan, lambda x: (replace(e, **new),) if x is e else None)


def _moved(plan: Plan, e: Event, to: Event, before: bool = True) -> Plan:
    gone = edited(plan.body, lambda x: () if x is e else None)
    there = edited(gone, lambda x: ((e, x) if before else (x, e)) if x is to else None)
    return projected(replace(plan, body=there))


def _records(plan: Plan, table: str, change: Callable[[Any], Any]) -> Plan:
    return replace(plan, **{table: tuple(change(x) for x in getattr(plan, table))})


def _pick(draw: random.Random, found: Sequence[T]) -> T | None:
    return draw.choice(found) if found else None


def _read_early(plan: Plan, draw: random.Random) -> Plan | None:
    """What reads rows comes before the event that makes them, or before their lengths are known."""
    makers = [e for e in _events(plan, Derive, Generate, Sample, Lengths) if not isinstance(e, Derive) or e.makes_rows]
    maker = _pick(draw, makers)
    if maker is None:
        return None
    readers = [e for e in _events(plan, Derive, Generate, Compute, Train, Store)
               if e is not maker and f"{maker.frame}." in repr(e.reads) or maker.frame in getattr(e, "frames", ())]
    reader = _pick(draw, [e for e in readers if e.id > maker.id])
    return None if reader is None else _moved(plan, reader, maker)


def _late_lengths(plan: Plan, draw: random.Random) -> Plan | None:
    """The exchange of lengths comes later, happens not at all, or under another spread of the same ranks."""
    e = _pick(draw, _events(plan, Lengths))
    if e is None:
        return None
    what = draw.randrange(3)
    if what == 0:
        return _with(plan, lambda x: () if x is e else None)
    if what == 1:
        later = _pick(draw, [x for x in _events(plan) if x.id > e.id][:12])
        return None if later is None else _moved(plan, e, later, before=False)
    other = _pick(draw, [s.id for s in plan.spreads if s.id != e.spread])
    return None if other is None else _changed(plan, e, spread=other)


def _buffer_order(plan: Plan, draw: random.Random) -> Plan | None:
    """Rows are sampled before or after the wrong add, with the versions that fit the new order or not."""
    found = _events(plan, Store, Sample)
    e, other = _pick(draw, found), _pick(draw, found)
    if e is None or other is None or e is other:
        return None
    moved = _moved(plan, e, other, before=draw.random() < 0.5)
    if draw.random() < 0.5:
        return moved
    last: dict[str, str] = {}

    def said(x: Item) -> tuple[Item, ...] | None:
        if not isinstance(x, Store | Sample):
            return None
        new = replace(x, version=last.get(x.buffer, ""))
        if isinstance(x, Store):
            last[x.buffer] = x.at
        return (new,)

    return _with(moved, said)


def _state_order(plan: Plan, draw: random.Random) -> Plan | None:
    """States of rows are read or written out of order, with what they follow changed with it or not."""
    found = _events(plan, RowStates)
    e, other = _pick(draw, found), _pick(draw, found)
    if e is None or other is None or e is other:
        return None
    moved = _moved(plan, e, other, before=draw.random() < 0.5)
    return moved if draw.random() < 0.5 else _with(
        moved, lambda x: (replace(x, follows=other.follows),) if isinstance(x, RowStates) and x.id == e.id else None)


def _other_frame(plan: Plan, draw: random.Random) -> Plan | None:
    """An event works on another frame, or pairs one with another, with all names that go with it."""
    e = _pick(draw, _events(plan, Derive, Generate, Compute, Train, Store, Lengths))
    if e is None:
        return None
    frames = {f.id: f for f in plan.frames}
    own = [f for f in frames if f in repr(e)]
    old = _pick(draw, own)
    if old is None:
        return None
    counts = {s.id: s.count for s in plan.spaces}
    alike = [f for f in frames if f != old and counts[frames[f].row_space] == counts[frames[old].row_space]]
    new = _pick(draw, alike if alike and draw.random() < 0.7 else [f for f in frames if f != old])
    if new is None:
        return None
    there = {v.id for v in plan.values}
    changed = renamed(e, {old: new})
    if draw.random() < 0.7 and not {b.rpartition("@")[0] for b in (*changed.reads, *changed.writes) if "." in b} <= there:
        return None
    return _with(plan, lambda x: (changed,) if x is e else None)


def _other_value(plan: Plan, draw: random.Random) -> Plan | None:
    """An event reads another value that is in the same place: of another part, of other rows, or of another kind."""
    e = _pick(draw, [x for x in _events(plan, Derive, Compute, Train, Store) if x.reads])
    if e is None:
        return None
    values = {v.id: v for v in plan.values}
    old = draw.choice([b.rpartition("@")[0] for b in e.reads])
    if old not in values:
        return None
    kind = values[old].extent, values[old].level, values[old].dtype
    new = _pick(draw, [v.id for v in plan.values if v.id != old and (v.extent, v.level, v.dtype) == kind])
    return None if new is None else _with(plan, lambda x: (renamed(e, {old: new}),) if x is e else None)


def _grown(plan: Plan, space: Space) -> Plan:
    """With a space of another size, and those below it that follow."""
    changed = {space.id: space}
    for _ in plan.spaces:
        for below in plan.spaces:
            if below.id in changed:
                continue
            if below.of in changed:
                changed[below.id] = replace(below, count=changed[below.of].count, fan=changed[below.of].fan)
            elif below.parent in changed:
                changed[below.id] = replace(below, count=changed[below.parent].count * below.fan)
    return _records(plan, "spaces", lambda s: changed.get(s.id, s))


def _cuts(plan: Plan, draw: random.Random) -> Plan | None:
    """Prefixes at other places, of another number, or several kinds of them."""
    e = _pick(draw, [x for x in _events(plan, Derive) if x.op == "prefixes"])
    if e is None:
        return None
    what = draw.randrange(4)
    if what == 0:
        frame = next(f for f in plan.frames if f.id == e.frame)
        space = next(s for s in plan.spaces if s.id == frame.row_space)
        fan = draw.choice([x for x in (1, 2, space.fan + 1, 2 * space.fan) if x != space.fan])
        return _grown(plan, replace(space, fan=fan, count=space.count // space.fan * fan))
    if what == 1:
        return _changed(plan, e, cut_every=draw.choice((0, -1, 1, 3, e.cut_every + 1)))
    if what == 2:
        return _changed(plan, e, cut_at=draw.choice(("", "x")), cut_every=draw.choice((0, e.cut_every)))
    return _changed(plan, e, cut_every=0, cut_fractions=draw.choice(((0.5,), (0.5, 0.25), (1.0,), (0.0, 0.5), (-0.5,), ())))


def _parent(plan: Plan, draw: random.Random) -> Plan | None:
    """A space below another parent: its grandparent, a selection, or a space of the same number of rows."""
    spaces = {s.id: s for s in plan.spaces}
    s = _pick(draw, [x for x in plan.spaces if x.parent])
    if s is None:
        return None
    above = spaces[s.parent]
    alike = [x for x in plan.spaces if x.id not in (s.id, above.id) and s.count % x.count == 0]
    to = _pick(draw, alike)
    if to is None:
        return None
    return _records(plan, "spaces", lambda x: replace(x, parent=to.id, fan=s.count // to.count) if x.id == s.id else x)


def _reduction(plan: Plan, draw: random.Random) -> Plan | None:
    """A number of other rows: reduced to another space, and the value a value of that frame, or not."""
    programs = [p for p in plan.programs if any(n.space for n in p.nodes)]
    p = _pick(draw, programs)
    if p is None:
        return None
    i = draw.choice([i for i, n in enumerate(p.nodes) if n.space])
    node = p.nodes[i]
    frames = [f for f in plan.frames if node.space != (f.id if node.level == "token" else f.row_space)]
    to = _pick(draw, frames)
    if to is None:
        return None
    old, new = node.space, to.id if node.level == "token" else to.row_space
    all_of_them = draw.random() < 0.5
    nodes = tuple(replace(n, space=new) if j == i or all_of_them and j > i and n.space == old else n
                  for j, n in enumerate(p.nodes))
    changed = _records(plan, "programs", lambda x: replace(x, nodes=nodes) if x is p else x)
    outputs = {v for e in _events(plan, Compute) if e.program == p.id for n, v in e.outputs
               if dict(p.outputs)[n] >= i and nodes[dict(p.outputs)[n]].space == new}
    if draw.random() < 0.6:
        changed = _records(changed, "values", lambda v: replace(v, frame=to.id) if v.id in outputs else v)
        changed = _with(changed, lambda x: (replace(x, frames=(*x.frames, to.id)),) if isinstance(x, Compute)
                        and x.program == p.id and to.id not in x.frames else None)
    return changed


SIBLINGS = ("next_row", "prev_row", "cumsum_rows", "at_last_row", "last_row", "over", "along", "discount_rows")


def _siblings(plan: Plan, draw: random.Random) -> Plan | None:
    """Another operator on siblings, other arguments, or another frame in its attributes."""
    places = [(p, i) for p in plan.programs for i, n in enumerate(p.nodes)
              if n.op in SIBLINGS or n.op in ("index", "prompt_len", "len", "py")]
    found = _pick(draw, places)
    if found is None:
        return None
    p, i = found
    n, what = p.nodes[i], draw.randrange(3)
    if what == 0 and n.op in SIBLINGS:
        new = replace(n, op=draw.choice([x for x in SIBLINGS if x != n.op]))
    elif what == 1 and n.args:
        new = replace(n, args=tuple(draw.randrange(i) for _ in n.args) if draw.random() < 0.5 else n.args[::-1])
    else:
        other = draw.choice(plan.frames).id
        at = [k for k, (name, _) in enumerate(n.attrs) if name == "frame" or name.startswith(("first", "argument"))]
        if not at:
            return None
        k = draw.choice(at)
        new = replace(n, attrs=tuple((name, other if j == k else x) for j, (name, x) in enumerate(n.attrs)))
    return _records(plan, "programs", lambda x: replace(
        x, nodes=tuple(new if j == i else y for j, y in enumerate(x.nodes))) if x is p else x)


def _cache(plan: Plan, draw: random.Random) -> Plan | None:
    """A KV cache freed before it is read, read after its weights changed, of another frame, or made elsewhere."""
    readers = [e for e in _events(plan, Generate) if e.cache_of]
    e = _pick(draw, readers)
    if e is None:
        return None
    what = draw.randrange(5)
    buffer = f"{e.cache_of}.cache"
    free = next((x for x in _events(plan, Free) if any(b.startswith(buffer) for b in x.buffers)), None)
    if what == 0 and free is not None:
        gone = tuple(b for b in free.buffers if b.startswith(buffer))
        early = replace(free, id=max(x.id for x in _events(plan)) + 1, buffers=gone)
        rest = replace(free, buffers=tuple(b for b in free.buffers if b not in gone))
        return _with(plan, lambda x: (early, x) if x is e else (rest,) if x is free else None)
    if what == 1:
        other = _pick(draw, [x for x in _events(plan, Train, Realloc) if x.model == e.model])
        return None if other is None else _moved(plan, other, e)
    if what == 2:
        frame = draw.choice(plan.frames).id
        names = {buffer: f"{frame}.cache"}
        return _with(plan, lambda x: (replace(renamed(e, names), cache_of=frame),) if x is e else None)
    if what == 3:
        writer = next(x for x in _events(plan, Generate) if x.frame == e.cache_of)
        return _with(plan, lambda x: (replace(x, writes=tuple(b for b in x.writes if not b.startswith(buffer))),)
                     if x is writer else None)
    prompts = draw.choice(plan.frames).id
    return _with(plan, lambda x: (renamed(e, {e.prompts: prompts}),) if x is e else None)


def _tokenizer(plan: Plan, draw: random.Random) -> Plan | None:
    """A frame of another tokenizer, alone or with all that come from it."""
    known = ["", *{f.tokenizer for f in plan.frames if f.tokenizer}, *(d.tokenizer for d in plan.data)]
    frame = draw.choice(plan.frames)
    new = _pick(draw, [x for x in known if x != frame.tokenizer])
    if new is None:
        return None
    whole = {f.id for f in plan.frames if f.tokenizer == frame.tokenizer} if draw.random() < 0.4 else {frame.id}
    return _records(plan, "frames", lambda f: replace(f, tokenizer=new) if f.id in whole else f)


def _limits(plan: Plan, draw: random.Random) -> Plan | None:
    """Other limits: of a frame, or of one and all that have the same."""
    frame = draw.choice(plan.frames)
    name = draw.choice(("max_prompt_tokens", "max_response_tokens"))
    old = getattr(frame, name)
    new = draw.choice([x for x in (0, 1, old - 1, old + 1, 2 * old) if x != old and x >= 0])
    alike = draw.random() < 0.4
    changed = _records(plan, "frames", lambda f: replace(f, **{name: new}) if f.id == frame.id or alike
                       and f.row_space == frame.row_space and getattr(f, name) == old else f)
    if draw.random() < 0.3:
        changed = _with(changed, lambda x: (replace(x, sampling=replace(x.sampling, max_new_tokens=max(new, 1))),)
                        if isinstance(x, Generate) and x.frame == frame.id else None)
    return changed


def _operation(plan: Plan, draw: random.Random) -> Plan | None:
    """Another operation, other parts, another key, other values that come along, or another function's arguments."""
    e = _pick(draw, _events(plan, Derive))
    if e is None:
        return None
    what = draw.randrange(6)
    if what == 0:
        return _changed(plan, e, op=draw.choice([x for x in DERIVE_OPS if x != e.op]))
    if what == 1 and e.parts:
        parts = draw.choice((e.parts[::-1], e.parts[1:], (*e.parts, e.parts[0]), (*e.parts[:-1], draw.choice(plan.frames).id)))
        return _changed(plan, e, parts=parts, source=draw.choice((e.source, parts[0] if parts else e.source)))
    if what == 2 and e.values:
        values = list(e.values)
        i, j = draw.randrange(len(values)), draw.randrange(len(values))
        values[i], values[j] = (values[j][0], values[i][1]), (values[i][0], values[j][1])
        return _changed(plan, e, values=tuple(values))
    if what == 3:
        seqs = [v.id for v in plan.values if v.level == "seq" and v.extent == "row"]
        key = _pick(draw, seqs)
        if key is None or not e.key:
            return None
        return _with(plan, lambda x: (renamed(e, {e.key: key}),) if x is e else None)
    if what == 4 and e.given:
        given = tuple((n, draw.choice(plan.frames).id) for n, _ in e.given)
        return _changed(plan, e, given=given)
    source = draw.choice(plan.frames).id
    return _changed(plan, e, source=source)


def _presence(plan: Plan, draw: random.Random) -> Plan | None:
    """A frame that is said to be present as another one is, all are, or by itself; and its copies likewise."""
    frame = draw.choice(plan.frames)
    new = draw.choice([x for x in ("", frame.id, *(f.id for f in plan.frames)) if x != frame.present_in])
    alike = draw.random() < 0.5
    return _records(plan, "frames", lambda f: replace(f, present_in=new) if f.id == frame.id or alike
                    and f.present_in == frame.present_in and f.row_space == frame.row_space else f)


def _division(plan: Plan, draw: random.Random) -> Plan | None:
    """Rows divided by other units or by those of another frame: siblings apart, a cache elsewhere."""
    used = {getattr(e, "spread", "") for e in _events(plan, Derive, Compute, Generate)}
    s = _pick(draw, [x for x in plan.spreads if x.id in used and x.frames])
    if s is None:
        return None
    what = draw.randrange(4)
    if what == 0:
        new = replace(s, granularity="row" if s.granularity == "prompt" else "prompt")
    elif what == 1:
        new = replace(s, balance_by=draw.choice([x for x in ("count", "tokens", "slot") if x != s.balance_by]))
    elif what == 2:
        new = replace(s, frames=(draw.choice(plan.frames).id, *s.frames[1:]))
    else:
        e = draw.choice([x for x in _events(plan, Derive, Compute, Generate) if x.spread == s.id])
        other = _pick(draw, [x for x in plan.spreads if x.id != s.id and x.mesh == s.mesh])
        if other is None:
            return None
        at = {f"@{s.id}": f"@{other.id}"}
        moved = replace(e, spread=other.id, **{
            side: tuple(b.replace(*next(iter(at.items()))) if b.endswith(f"@{s.id}") else b for b in getattr(e, side))
            for side in ("reads", "writes")})
        return _with(plan, lambda x: (moved,) if x is e else None)
    return _records(plan, "spreads", lambda x: new if x.id == s.id else x)


def _lineage(plan: Plan, draw: random.Random) -> Plan | None:
    """A frame that is selected or picked from another one, or whose space is; or the parts of a root in other places."""
    what = draw.randrange(3)
    roots = [s for s in plan.spaces if s.parts]
    if what == 0 and roots:
        s = draw.choice(roots)
        parts = draw.choice((s.parts[::-1], tuple((p, 0) for p, _ in s.parts), s.parts[1:],
                             tuple((draw.choice(plan.spaces).id, n) for _, n in s.parts)))
        return _records(plan, "spaces", lambda x: replace(x, parts=parts) if x.id == s.id else x)
    frames = [f for f in plan.frames if f.selected_from or f.picked_from]
    frame = _pick(draw, frames)
    if frame is None:
        return None
    name = "selected_from" if frame.selected_from else "picked_from"
    other = draw.choice(plan.frames)
    changed = _records(plan, "frames", lambda f: replace(f, **{name: other.id}) if f.id == frame.id else f)
    if what == 1:
        changed = _records(changed, "spaces", lambda s: replace(s, of=other.row_space) if s.id == frame.row_space and s.of else s)
    return changed


def _sampled(plan: Plan, draw: random.Random) -> Plan | None:
    """Other fields of a replay buffer, another buffer, or another kind of rows."""
    if not plan.buffers:
        return None
    e, b = draw.choice(_events(plan, Store, Sample)), draw.choice(plan.buffers)
    what = draw.randrange(4)
    if what == 0:
        values = list(e.values)
        draw.shuffle(values)
        return _changed(plan, e, values=tuple(values))
    if what == 1:
        name = draw.choice(("data", "tokenizer", "temperature", "max_prompt_tokens", "max_response_tokens", "capacity"))
        new: dict[str, Any] = {"data": draw.choice(plan.data).name, "tokenizer": draw.choice(plan.data).tokenizer,
                               "temperature": 0.5, "capacity": b.capacity + draw.choice((-1, 1))}
        value = new[name] if name in new else getattr(b, name) - 1
        return _records(plan, "buffers", lambda x: replace(x, **{name: value}) if x is b else x)
    if what == 2:
        fields_ = list(b.fields)
        draw.shuffle(fields_)
        return _records(plan, "buffers", lambda x: replace(x, fields=tuple(fields_)) if x is b else x)
    return _changed(plan, e, frame=draw.choice(plan.frames).id)


def _weight(plan: Plan, draw: random.Random) -> Plan | None:
    """Rows drawn by another weight, or by another state, column or field; or one of its inputs is not there."""
    e = _pick(draw, _events(plan, Draw, Sample))
    if e is None:
        return None
    names = {"inputs": [s.value for s in plan.states] + [b.value for b in plan.buffers]}
    names |= {"columns": [c for d in plan.data for c in d.numbers]} if isinstance(e, Draw) else {
        "fields": [f.name for b in plan.buffers for f in b.fields]}
    what = draw.choice(("program", *(name for name in names if getattr(e, name))))
    if what == "program":
        return _changed(plan, e, program=draw.choice(("", *(p.id for p in plan.programs))))
    given = list(getattr(e, what))
    i = draw.randrange(len(given))
    if draw.random() < 0.3:
        del given[i]
    else:
        given[i] = given[i][0], draw.choice(names[what])
    return _changed(plan, e, **{what: tuple(given)})


OPERATORS: Mapping[str, Operator] = {
    "rows read early": _read_early, "lengths late": _late_lengths, "buffer out of order": _buffer_order,
    "row state out of order": _state_order, "another frame": _other_frame, "another value": _other_value,
    "cuts": _cuts, "another parent": _parent, "another space": _reduction, "siblings": _siblings, "cache": _cache,
    "tokenizer": _tokenizer, "limits": _limits, "operation": _operation, "presence": _presence, "division": _division,
    "lineage": _lineage, "buffer": _sampled, "weight": _weight,
}


def row_mutants(plan: Plan, draw: random.Random, count: int) -> Iterator[tuple[str, Plan]]:
    """At most `count` mutants, as many of each operator that the plan has anything for."""
    for i in range(count):
        told = [*OPERATORS][i % len(OPERATORS)]
        for _ in range(8):
            mutant = OPERATORS[told](plan, draw)
            if mutant is not None and mutant != plan:
                yield told, mutant
                break
