"""Plans with one or two mistakes in them, of every kind that a compiler, a disk or a person could make.

In: a plan and a source of random choices. Out: what was done, and the mutant. Every field of every record is reached:
a number is resized, a name becomes another one of the plan or none, a list loses, repeats or swaps entries; records
and events are dropped, repeated, swapped and moved. Types stay what the format says. As a compiler's mistake would
have it, classes follow the body, and what a realloc says of itself follows its layouts, mostly.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rldsl.diag import Failure, InternalError
from rldsl.plan.events import Event, When, Item, Loop, Realloc
from rldsl.plan.model import ROLES, ParamSpec, Plan, Space, Split
from rldsl.plan.projection import rank_classes, walk
from rldsl.reshard import planning, summary
from rldsl.sharding import dtypes

Path = tuple[str | int, ...]
TABLES = tuple(f.name for f in fields(Plan) if f.name not in ("header", "body"))
BODY = ("drop", "repeat", "move", "swap", "renumber", "wrap", "unwrap")


@dataclass
class Mutator:
    """seen: (record, field) -> values that stand there in the plan. names: all ids of the plan."""

    plan: Plan
    draw: random.Random
    seen: dict[tuple[type, str], list[Any]] = field(default_factory=lambda: defaultdict(list))
    places: dict[type, list[Path]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for path, record in records(self.plan):
            self.places[type(record)].append(path)
            for f in fields(record):
                self.seen[type(record), f.name].append(getattr(record, f.name))
        p = self.plan
        tables = (p.meshes, p.layouts, p.spreads, p.spaces, p.frames, p.values, p.functions, p.programs, p.groups)
        self.names = [x.id for table in tables for x in table] + [x.name for x in (*p.models, *p.data)]

    def mutant(self) -> tuple[str, Plan]:
        told, plan = self._one(self.plan)
        if self.draw.random() < 0.15:
            try:
                more, plan = self._one(plan)
            except (LookupError, AttributeError, TypeError):
                more = "nothing"  # what the second would change is gone
            told = f"{told}; {more}"
        if self.draw.random() < 0.7:
            plan = projected(plan)
        return told, repaired(plan) if self.draw.random() < 0.6 else plan

    def _one(self, plan: Plan) -> tuple[str, Plan]:
        kind = self.draw.random()
        if kind < 0.2:
            return self._body(plan)
        if kind < 0.28:
            return self._table(plan)
        cls = self.draw.choice([c for c in self.places if c is not Plan])
        path, f = self.draw.choice(self.places[cls]), self.draw.choice([f for f in fields(cls) if f.name != "body"])
        return f"{cls.__name__}.{f.name}", self.field(plan, path, f.name)

    def field(self, plan: Plan, path: Path, name: str) -> Plan:
        """The plan with another value in one field."""
        cls = type(at(plan, path))
        old = getattr(at(plan, path), name)
        new = self._other(old, hints(cls)[name], self.seen[cls, name])
        return put(plan, (*path, name), new)

    # -------------------------------------------------------------------------------------------------- values

    def _other(self, old: Any, hint: Any, pool: list[Any]) -> Any:
        """Another value of the same type."""
        pick = self.draw.choice
        others = [x for x in pool if x != old]
        if get_origin(hint) is Literal:
            return pick([x for x in get_args(hint) if x != old])
        if isinstance(old, tuple):
            return self._list(old, hint, others)
        if old is None or is_dataclass(old):
            return pick([*others, None]) if type(None) in get_args(hint) else pick(others or [old])
        if others and self.draw.random() < 0.5:
            return pick(others)
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return pick([x for x in (0, 1, -1, old + 1, old - 1, 2 * old, old + 1000) if x != old])
        if isinstance(old, float):
            return pick([x for x in (0.0, 1.0, -old, 2 * old, old + 0.5, -1.0) if x != old])
        return self._name(old)

    def _name(self, old: str) -> str:
        left, _, right = old.rpartition("@")
        if left and self.draw.random() < 0.9:
            other = self.draw.choice([n for n in self.names if n not in (left, right)])
            return self.draw.choice((f"{left}@{other}", f"{other}@{right}"))
        return self.draw.choice((old + "x", "", *self.draw.choices(self.names, k=4)))

    def _list(self, old: tuple[Any, ...], hint: Any, others: list[Any]) -> tuple[Any, ...]:
        items, entries = list(old), [x for other in others if isinstance(other, tuple) for x in other]
        args = get_args(hint)
        if args and ... not in args:  # a pair stays one
            i = self.draw.randrange(len(args))
            return tuple(self._other(x, args[i], []) if j == i else x for j, x in enumerate(items))
        if not items:
            return (self.draw.choice(entries),) if entries else ()
        i, what = self.draw.randrange(len(items)), self.draw.randrange(5)
        if what == 0:
            del items[i]
        elif what == 1:
            items.insert(self.draw.randrange(len(items) + 1), items[i])
        elif what == 2 and len(items) > 1:
            j = self.draw.choice([j for j in range(len(items)) if j != i])
            items[i], items[j] = items[j], items[i]
        elif what == 3 and entries:
            items[i] = self.draw.choice(entries)
        else:
            inner = args[0] if args else type(items[i])
            items[i] = self._other(items[i], inner, [x for x in (*old, *entries)])
        return tuple(items)

    # ------------------------------------------------------------------------------------------------- records

    def _table(self, plan: Plan) -> tuple[str, Plan]:
        name = self.draw.choice([n for n in TABLES if getattr(plan, n)])
        rows = list(getattr(plan, name))
        i, what = self.draw.randrange(len(rows)), self.draw.choice(("drop", "repeat", "swap"))
        if what == "drop":
            del rows[i]
        elif what == "repeat":
            rows.insert(self.draw.randrange(len(rows) + 1), rows[i])
        else:
            j = self.draw.randrange(len(rows))
            rows[i], rows[j] = rows[j], rows[i]
        return f"{what} in {name}", replace(plan, **{name: tuple(rows)})

    def _body(self, plan: Plan) -> tuple[str, Plan]:
        flat = [e for e, _ in walk(plan.body)]
        e, other = self.draw.choice(flat), self.draw.choice(flat)
        what, free = self.draw.choice(BODY), max(x.id for x in flat) + 1
        if what in ("move", "swap") and other.id == e.id:
            what = "drop"
        if what == "unwrap":
            blocks = [x for x in _blocks(plan.body)]
            block = self.draw.choice(blocks)
            return what, replace(plan, body=edited(plan.body, lambda x: x.body if x is block else None))
        gone = edited(plan.body, lambda x: () if x is e else None)
        again = replace(e, id=self.draw.choice((free, e.id)))
        block = self.draw.choice((When(2, (e,)), Loop("more", 2, (e,))))
        numbered = replace(e, id=self.draw.choice((free, other.id)))
        new: dict[str, tuple[Item, ...]] = {"repeat": (e, again), "swap": (other,), "renumber": (numbered,),
                                            "wrap": (block,)}
        if what in new:
            body = edited(plan.body, lambda x: new[what] if x is e else (e,) if what == "swap" and x is other else None)
        else:
            body = edited(gone, lambda x: (e, x) if what == "move" and x is other else None)
        return f"{what} {type(e).__name__}", replace(plan, body=body)


# ------------------------------------------------------------------------------------------------------ surgery


def records(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every record in a plan, with the way to it."""
    if is_dataclass(node):
        if path:
            yield path, node
        for f in fields(node):
            yield from records(getattr(node, f.name), (*path, f.name))
    elif isinstance(node, tuple):
        for i, x in enumerate(node):
            yield from records(x, (*path, i))


def at(node: Any, path: Path) -> Any:
    for step in path:
        node = node[step] if isinstance(step, int) else getattr(node, step)
    return node


def put(node: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        return (*node[:step], put(node[step], rest, value), *node[step + 1 :])
    return replace(node, **{step: put(getattr(node, step), rest, value)})


def edited(items: tuple[Item, ...], edit: Callable[[Item], tuple[Item, ...] | None]) -> tuple[Item, ...]:
    """The body with some items replaced by others; `edit` returns None for what stays."""
    out: list[Item] = []
    for x in items:
        new = edit(x)
        if new is not None:
            out += new
        else:
            out.append(x if isinstance(x, Event) else replace(x, body=edited(x.body, edit)))
    return tuple(out)


def _blocks(items: tuple[Item, ...]) -> Iterator[Loop | When]:
    for x in items:
        if not isinstance(x, Event):
            yield x
            yield from _blocks(x.body)


def projected(plan: Plan) -> Plan:
    """With the classes that the body has, where that can be said."""
    world = plan.header.world
    if not 0 < world < 1000 or any(not 0 <= a <= b <= world for m in plan.meshes for a, b in m.ranks):
        return plan
    peaks = {r: c.peak_bytes for c in plan.classes for a, b in c.ranks for r in range(max(a, 0), min(b, world))}
    return replace(plan, classes=rank_classes(plan.meshes, plan.body, world, peaks))


def repaired(plan: Plan) -> Plan:
    """With reallocs that say what their layouts make of them, where they make anything."""
    models, layouts = {m.name: m for m in plan.models}, {x.id: x for x in plan.layouts}
    meshes = {m.id: m for m in plan.meshes}

    def said(e: Item) -> tuple[Item, ...] | None:
        if not isinstance(e, Realloc):
            return None
        try:
            model, src, dst = models[e.model], layouts[e.src], layouts[e.dst]
            where = src, meshes[src.mesh], dst, meshes[dst.mesh], plan.header.devices_per_node
            total = summary.joined([summary.summary(planning.plan_reshard(part, *where), part) for part in
                                    dtypes.in_wire_dtypes(models[e.origin], e.src, model, e.dst, e.decay)])
        except (LookupError, AssertionError, ValueError, ArithmeticError, Failure, InternalError):
            return None
        return (replace(e, bytes=total.bytes, messages=total.messages, digest=total.digest),)

    return replace(plan, body=edited(plan.body, said))


@cache
def hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


# ------------------------------------------------------------------------------------------- tables of models and data


def parameter_mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every model with another parameter table, of the kind that is consistent with itself: only the model's directory
    can tell. Each parameter is changed in each way that fits it."""
    for i, m in enumerate(plan.models):
        yield f"{m.name}: layers", _row(plan, "models", i, layers=1 if m.layers > 1 else 2)
        yield f"{m.name}: sizes", _row(plan, "models", i, sizes=replace(m.sizes, kv_heads=m.sizes.kv_heads + 1))
        yield f"{m.name}: config", _row(plan, "models", i, config_digest="0" * 64)
        if m.lora is not None:
            yield f"{m.name}: transposed", _row(plan, "models", i, lora=replace(m.lora, transposed=True))
        for table in ("params", "base"):
            specs = getattr(m, table)
            if len(specs) > 1:
                yield f"{m.name}.{table}: order", _row(plan, "models", i, **{table: specs[::-1]})
            for j, spec in enumerate(specs):
                yield (f"{m.name}.{table} without {spec.name}",
                       _row(plan, "models", i, **{table: (*specs[:j], *specs[j + 1 :])}))
                for what, other in _other_specs(spec):
                    yield (f"{m.name}.{table} {spec.name}: {what}",
                           _row(plan, "models", i, **{table: (*specs[:j], other, *specs[j + 1 :])}))


def _other_specs(spec: ParamSpec) -> Iterator[tuple[str, ParamSpec]]:
    yield "name", replace(spec, name=f"../../{spec.name}")
    yield "stage", replace(spec, stage="ends" if spec.stage != "ends" else "first")
    yield "shape", replace(spec, shape=(*spec.shape[:-1], spec.shape[-1] + 1))
    yield "stored", replace(spec, stored=("model.norm.weight",))
    yield "partial_grad", replace(spec, partial_grad=not spec.partial_grad)
    if spec.layers:
        yield "layers", replace(spec, layers=spec.layers - 1)
    if spec.split is None:
        yield "split", replace(spec, split=Split(0, ((spec.shape[0], 1),)), style="colwise")
        return
    yield "whole", replace(spec, split=None, style="replicated")
    for factor in (2, 3):
        coarser = tuple((u // factor, n * factor) for u, n in spec.split.parts if u % factor == 0)
        finer = tuple((u * factor, n // factor) for u, n in spec.split.parts if n % factor == 0)
        for what, parts in (("coarser", coarser), ("finer", finer)):
            if len(parts) == len(spec.split.parts):
                yield f"units {what} by {factor}", replace(spec, split=replace(spec.split, parts=parts))


def data_mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Every data source with another kind, other columns or limits, or a path that is no file of rows."""
    for i, d in enumerate(plan.data):
        for kind, roles in ROLES.items():
            if kind != d.row_format:
                yield f"{d.name}: kind {kind}", _row(plan, "data", i, row_format=kind)
                columns = tuple((role, role) for role in roles)
                yield f"{d.name}: kind {kind} with its columns", _row(plan, "data", i, row_format=kind, columns=columns)
        for path in ("/proc/self/mem", "/proc/self/../self/environ", "/dev/zero", "/sys/kernel/notes", "x\0y"):
            yield f"{d.name}: path {path!r}", _row(plan, "data", i, path=path)
            yield f"{d.name}: tokenizer {path!r}", _row(plan, "data", i, tokenizer=path)
        yield f"{d.name}: columns", _row(plan, "data", i, columns=d.columns[1:])
        yield f"{d.name}: limit", _row(plan, "data", i, max_prompt_tokens=d.max_prompt_tokens + 1)
        if d.images:
            yield f"{d.name}: image limit", _row(plan, "data", i, max_image_tokens=d.max_prompt_tokens + 1)
        yield f"{d.name}: answers", _row(plan, "data", i, max_answer_tokens=d.max_answer_tokens + 1)


def _row(plan: Plan, table: str, number: int, **new: object) -> Plan:
    rows = list(getattr(plan, table))
    rows[number] = replace(rows[number], **new)
    return replace(plan, **{table: tuple(rows)})


def space_mutant(plan: Plan, draw: random.Random) -> tuple[str, Plan]:
    """A plan whose spaces still form trees, but others: rows of a whole tree below a space are more or fewer, a space
    moves below another one or becomes a root, a selection becomes none or one of another space, frames change
    spaces, or iterations do."""
    spaces = {s.id: s for s in plan.spaces}
    s, other = draw.choice(plan.spaces), draw.choice(plan.spaces)
    what = draw.choice(("grow", "fan", "move", "root", "of", "frames", "iterations"))
    changed: dict[str, Space] = {}
    if what == "grow":
        factor = draw.choice((2, 3))
        changed[s.id] = replace(s, count=s.count * factor, fan=s.fan * factor if s.parent else 1)
    elif what == "fan" and s.parent:
        fan = draw.choice([x for x in (1, 2, s.fan + 1, 2 * s.fan) if x != s.fan])
        changed[s.id] = replace(s, fan=fan, count=spaces[s.parent].count * fan)
    elif what == "move":
        changed[s.id] = replace(s, parent=other.id, count=other.count * s.fan, iterations=1)
    elif what == "root":
        changed[s.id] = replace(s, parent="", fan=1)
    elif what == "of":
        changed[s.id] = replace(s, of=draw.choice(("", other.id)))
    elif what == "iterations":
        changed[s.id] = replace(s, iterations=draw.choice([x for x in (1, 2, 3, s.count) if x != s.iterations]))
    for _ in plan.spaces:  # those below follow
        for below in plan.spaces:
            above = changed.get(below.parent)
            if above is not None and below.id not in changed:
                changed[below.id] = replace(below, count=above.count * below.fan)
    frames = plan.frames
    if what == "frames":
        chosen = draw.choice(plan.frames)
        frames = tuple(replace(f, row_space=other.id) if f.id == chosen.id else f for f in plan.frames)
    told = f"{what} {s.id} {other.id}"
    return told, replace(plan, spaces=tuple(changed.get(x.id, x) for x in plan.spaces), frames=frames)
