"""What changed between two plans, for a person: calls, layouts, movements, bytes, memory, time.

In: two plans, and what a simulator predicts for them. Out: a `Diff`. Events are matched by what they mean
(`inspect/event_matching.py`): their names and places in the program, never their ids. Plans that differ are never the
same: where no section shows how, `others` names the records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

from rldsl.diag import internal_error
from rldsl.inspect.event_matching import Found, Pair, found, pairs, text
from rldsl.plan.codec import encode
from rldsl.plan.events import EVENTS, Event, Item, When
from rldsl.plan.model import Model, Plan
from rldsl.plan.naming import label_text
from rldsl.plan.notation import ranks_text
from rldsl.plan.projection import event_paths, times

Record = Mapping[str, str]  # field -> text
CALLS = ("calls", "inserted")
# kind of record -> the sections that tell how it differs; meshes, groups, spreads and the like show at events alone
TELLS: dict[str, tuple[str, ...]] = {
    "header": ("program",), "class": (*CALLS, "metrics", "peaks"), "log": (*CALLS, "metrics"),
    **dict.fromkeys(("model", "data", "function", "state"), ("tables",)),
    **dict.fromkeys(("loop", "when", "end"), ("tables", "program")),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference."""

    what: str  # "param", "model", "block", ...
    name: str  # which of them
    field: str  # of it; "" if it was added or removed
    before: str | None  # None: it was added
    after: str | None  # None: it was removed


@dataclass(frozen=True, slots=True)
class EventChange:
    """A call or an inserted event that was added, removed or changed."""

    before: Found | None  # None: it was added
    after: Found | None  # None: it was removed
    changes: tuple[Change, ...] = ()  # of where it runs, and of its options

    @property
    def now(self) -> Found:
        if (now := self.after or self.before) is None:
            raise internal_error("a change of an event that neither plan has")
        return now

    @property
    def moved(self) -> bool:
        """Whether it runs on another mesh or with other degrees."""
        return any(c.field == "where" for c in self.changes)


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that events of one kind move between ranks."""

    kind: str  # of event
    before: int  # bytes per step, on average
    after: int  # bytes per step, on average
    ragged_before: float  # events per step whose bytes depend on the lengths of sequences, on average
    ragged_after: float  # the same


@dataclass(frozen=True, slots=True)
class Peak:
    """Estimated peak memory of some ranks."""

    ranks: str  # as text: "ranks 0-3"
    before: int | None  # bytes; None: the ranks were not part of the world
    after: int | None  # bytes; None: the ranks are not part of the world


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences between two plans."""

    program: tuple[Change, ...]  # params, steps, blocks
    tables: tuple[Change, ...]  # models, data, functions, states
    calls: tuple[EventChange, ...]  # calls of models
    inserted: tuple[EventChange, ...]  # events that the compiler inserted
    metrics: tuple[Change, ...]  # what is logged
    moved: tuple[Moved, ...]  # bytes between ranks, by kind of event
    peaks: tuple[Peak, ...]  # estimated memory
    others: tuple[str, ...] = ()  # kinds of records that differ and have no section
    seconds: tuple[float, float] | None = None  # predicted for a step, before and after; None: not simulated

    @property
    def same(self) -> bool:
        """Nothing differs; what a simulator predicts does not count."""
        return not (self.program or self.tables or self.calls or self.inserted or self.metrics or self.moved
                    or self.peaks or self.others)


def diff(before: Plan, after: Plan, seconds: tuple[float, float] | None = None) -> Diff:
    """seconds: predicted time of a step under each plan."""
    matched = list(pairs(found(before), found(after)))
    changed = [c for c in (_event(pair) for pair in matched) if c is not None]
    made = Diff(
        program=(*_program(before, after),),
        tables=(*_tables(before, after), *_blocks(before, after)),
        calls=tuple(c for c in changed if not c.now.inserted),
        inserted=tuple(c for c in changed if c.now.inserted),
        metrics=tuple(_keyed("metric", _metrics(before), _metrics(after))),
        moved=tuple(_moved(before, after)),
        peaks=tuple(_peaks(before, after)),
        seconds=seconds,
    )
    return replace(made, others=tuple(_others(before, after, made)))


# --------------------------------------------------------------------------------------- the program and its tables


def _program(before: Plan, after: Plan) -> Iterator[Change]:
    a, b = before.header, after.header
    for name in ("program", "flow", "world", "devices_per_node", "memory", "steps", "seed", "lag", "compiler"):
        yield from _field("plan", name, "", getattr(a, name), getattr(b, name))
    yield from _keyed("source", {p: d[:12] for p, d in a.sources}, {p: d[:12] for p, d in b.sources})
    yield from _keyed("param", {k: text(v) for k, v in a.params}, {k: text(v) for k, v in b.params})


def _tables(before: Plan, after: Plan) -> Iterator[Change]:
    """Tables with names of the program. Those of sequences and values follow from the calls that make them."""
    yield from _records("model", *({m.name: _flat(_changeable_fields(m)) for m in plan.models}
                                   for plan in (before, after)))
    yield from _records("data", *({d.name: _flat(d) for d in plan.data} for plan in (before, after)))
    yield from _records("function", *({f.id: _flat(f) for f in plan.functions} for plan in (before, after)))
    yield from _records("state", *({s.value: {"initial": text(s.initial)} for s in plan.states}
                                   for plan in (before, after)))


def _changeable_fields(model: Model) -> dict[str, Any]:
    """What a person can change of a model; parameters as a number and a digest. The training layout shows at the
    calls."""
    optimizer = {f"optimizer.{k}": v for k, v in _flat(model.optimizer).items()} if model.optimizer else {}
    lora = {f"lora.{k}": v for k, v in _flat(model.lora).items()} if model.lora else {}
    return {"kind": model.head_name, "path": model.path, "dtype": model.dtype, "layers": model.layers,
            "config": model.config_digest[:12], "trained": bool(model.train_layout),
            "planned_updates": model.planned_updates,
            "follows": ", ".join(dict.fromkeys(model.updated_from)), "parameters": _digest(model.params),
            "base": _digest(model.base), "sizes": text(tuple(_flat(model.sizes).items())),
            "invariant": model.invariant, **optimizer, **lora}


def _blocks(before: Plan, after: Plan) -> Iterator[Change]:
    """Loops and `every`s. The loop of the steps has its number in the header."""
    yield from _records("block", dict(_block(before.body, "")), dict(_block(after.body, "")))


def _block(items: Iterable[Item], path: str) -> Iterator[tuple[str, Record]]:
    number = 0
    for item in items:
        if isinstance(item, Event):
            continue
        if isinstance(item, When):
            number += 1
            name = f"{path}when#{number}"
            yield name, {"runs": item.head}
        else:
            name = f"{path}{item.id}"
            trips = {"trips": str(item.trips)} if path else {}
            yield name, {**trips, "until": label_text(item.until.partition("@")[0]), "over": item.over,
                         "collects": ", ".join(b.partition("@")[0] for b in item.collects)}
        yield from _block(item.body, f"{name} > ")


def _metrics(plan: Plan) -> dict[str, str]:
    return {name: "" for event, _ in event_paths(plan) for name, _ in event.logged}


# ----------------------------------------------------------------------------------------------------------- events


def _event(pair: Pair) -> EventChange | None:
    a, b = pair.before, pair.after
    if a is None or b is None:
        return EventChange(a, b)
    changes = [Change(b.kind, b.about, name, *(_shown(name, side.facts.get(name, "")) for side in (a, b)))
               for name in dict.fromkeys((*a.facts, *b.facts)) if a.facts.get(name) != b.facts.get(name)]
    return EventChange(a, b, tuple(changes)) if changes else None


def _shown(fact: str, text: str) -> str:
    """Of a computation only which one it is."""
    return sha256(text.encode()).hexdigest()[:8] if fact == "operations" and text else text


# --------------------------------------------------------------------------------------------------- bytes, memory


def _moved(before: Plan, after: Plan) -> Iterator[Moved]:
    a, b = _bytes(before), _bytes(after)
    for name in dict.fromkeys((*a, *b)):
        one, two = a.get(name, (0, 0.0)), b.get(name, (0, 0.0))
        if one != two:
            yield Moved(name, one[0], two[0], one[1], two[1])


def _bytes(plan: Plan) -> dict[str, tuple[int, float]]:
    """Kind -> bytes in a step, and events in a step whose bytes are known at run time."""
    totals: dict[str, tuple[int, int]] = {}
    for event, path in event_paths(plan):
        runs, (known, ragged) = times(path), totals.get(event.kind, (0, 0))
        totals[event.kind] = (known + max(event.bytes, 0) * runs, ragged + (event.bytes < 0) * runs)
    steps = max(plan.header.steps, 1)
    return {name: (round(known / steps), round(ragged / steps, 3)) for name, (known, ragged) in totals.items()
            if (known or ragged) and name != "log"}


def _peaks(before: Plan, after: Plan) -> Iterator[Peak]:
    a, b = _peak(before), _peak(after)
    alike: dict[tuple[int | None, int | None], list[int]] = {}
    for rank in sorted(a.keys() | b.keys()):
        pair = (a.get(rank), b.get(rank))
        if pair[0] != pair[1]:
            alike.setdefault(pair, []).append(rank)
    for (one, two), ranks in alike.items():
        yield Peak(ranks_text(ranks), one, two)


def _peak(plan: Plan) -> dict[int, int]:
    return {rank: c.peak_bytes for c in plan.classes for start, stop in c.ranks for rank in range(start, stop)}


def _others(before: Plan, after: Plan, made: Diff) -> Iterator[str]:
    """Kinds of records that differ in two files and that no section of the differences covers."""
    a, b = (encode(plan).decode().split("\n")[:-2] for plan in (before, after))
    if a == b:
        return
    one, two = (Counter(_record(line, made.same) for line in lines) for lines in (a, b))
    kinds = dict.fromkeys(kind for kind, _ in ((one - two) + (two - one)))
    yield from (kind for kind in kinds if not any(getattr(made, section) for section in TELLS.get(kind, CALLS)))
    if made.same and not kinds:
        yield "order"


def _record(line: str, whole: bool) -> tuple[str, str]:
    """(kind, the rest). whole: with an event's number and position, which shift where something else came or went."""
    record = json.loads(line)
    kind = record.pop("kind")
    if not whole and kind in EVENTS:
        record = {name: value for name, value in record.items() if name not in ("id", "at", "source_version")}
    return kind, json.dumps(record, sort_keys=True)


# ----------------------------------------------------------------------------------------------------------- helpers


def _field(what: str, name: str, field: str, before: Any, after: Any) -> Iterator[Change]:
    if before != after:
        yield Change(what, name, field, text(before), text(after))


def _keyed(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Change(what, name, "", before.get(name), after.get(name))


def _records(what: str, before: Mapping[str, Record], after: Mapping[str, Record]) -> Iterator[Change]:
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            yield Change(what, name, "", None if a is None else "", None if b is None else "")
            continue
        for field in dict.fromkeys((*a, *b)):
            yield from _field(what, name, field, a.get(field, ""), b.get(field, ""))


def _flat(record: Any) -> dict[str, str]:
    """Field -> text, the name aside."""
    if isinstance(record, dict):
        return {name: text(value) for name, value in record.items()}
    return {f.name: text(getattr(record, f.name)) for f in fields(record) if f.name not in ("id", "name")}


def _digest(records: Any) -> str:
    """How many there are, and which."""
    return f"{len(records)} ({sha256(repr(records).encode()).hexdigest()[:8]})"
