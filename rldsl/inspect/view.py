"""A plan as values for `rlc show`: what an event touches and who else does, and everything as JSON.

In: a plan. Out: records, and objects of plain types for `json`. docs/plans.md describes the JSON; FORMAT grows when a
field goes or changes its meaning, not when one comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from typing import Any

from rldsl.diag import fail
from rldsl.plan.events import Event, Item, Loop, When
from rldsl.plan.model import Plan, Ranges
from rldsl.plan.naming import PlaceTexts
from rldsl.plan.projection import Path, class_of, event_paths, no_mesh, ranges, schedule

FORMAT = 2
OWN = tuple(f.name for f in fields_of(Event))  # fields that every event has


@dataclass(frozen=True, slots=True)
class Touch:
    """A buffer that an event reads or writes."""

    buffer: str  # `value@spread` or `model@layout`
    where: str  # the ranks that hold it, as text
    write: bool  # whether the event writes it
    written_by: tuple[int, ...]  # ids of all events that write it
    read_by: tuple[int, ...]  # ids of all events that read it
    freed_by: tuple[int, ...]  # ids of all events that free it


@dataclass(frozen=True, slots=True)
class View:
    """One event in full."""

    event: Event  # the event
    ranks: Ranges  # its participants
    inside: Path  # the blocks around it, the outermost first
    where: str  # the layout that it runs under, or from where to where it moves something
    fields: tuple[tuple[str, Any], ...]  # (name, value) of those of its kind
    touches: tuple[Touch, ...]  # its buffers


def check_rank(plan: Plan, rank: int) -> None:
    """RL0608: the plan has no such rank."""
    if not 0 <= rank < plan.header.world:
        last = plan.header.world - 1
        raise fail("RL0608", f"the plan has no rank {rank}", place="--rank",
                   help=f"ranks are 0 to {last}" if last else "its only rank is 0")


def view(plan: Plan, id: int) -> View:
    """The event with this id. RL0608: there is none."""
    every = list(event_paths(plan))
    found = next(((e, path) for e, path in every if e.id == id), None)
    if found is None:
        ids = [e.id for e, _ in every]
        raise fail("RL0608", f"the plan has no event {id}", place="--event",
                   help=f"events are {min(ids)} to {max(ids)}; `rlc show PLAN` lists them" if ids else "it has none")
    return _view(_Index.of(plan, every), *found)


def views(plan: Plan) -> tuple[View, ...]:
    """Every event, in order."""
    every = list(event_paths(plan))
    index = _Index.of(plan, every)
    return tuple(_view(index, e, path) for e, path in every)


@dataclass(frozen=True, slots=True)
class _Index:
    """What all views of a plan look up."""

    meshes: Mapping[str, Ranges]  # mesh -> its ranks
    places: PlaceTexts  # meshes, layouts and spreads as text
    written: Mapping[str, Sequence[int]]  # buffer -> ids of the events that write it, in order
    read: Mapping[str, Sequence[int]]  # buffer -> ids of the events that read it, in order
    freed: Mapping[str, Sequence[int]]  # buffer -> ids of the events that free it, in order

    @staticmethod
    def of(plan: Plan, every: Sequence[tuple[Event, Path]]) -> _Index:
        written, read, freed = (defaultdict[str, list[int]](list) for _ in range(3))
        for e, _ in every:
            for ids, buffers in ((written, e.writes), (read, e.reads), (freed, e.frees)):
                for buffer in dict.fromkeys(buffers):
                    ids[buffer].append(e.id)
        return _Index({m.id: m.ranks for m in plan.meshes}, PlaceTexts.of(plan), written, read, freed)

    def ranks(self, event: Event) -> Ranges:
        if event.mesh not in self.meshes:
            raise no_mesh(event)
        return self.meshes[event.mesh]

    def touch(self, buffer: str, write: bool) -> Touch:
        of = (tuple(ids.get(buffer, ())) for ids in (self.written, self.read, self.freed))
        return Touch(buffer, self.places.holder(buffer), write, *of)


def _view(index: _Index, event: Event, path: Path) -> View:
    touched = [*((b, False) for b in dict.fromkeys((*event.reads, *event.frees))), *((b, True) for b in event.writes)]
    return View(event, index.ranks(event), path, index.places.where(event), fields(event),
                tuple(index.touch(buffer, write) for buffer, write in touched))


def fields(event: Event) -> tuple[tuple[str, Any], ...]:
    """The fields of an event that only its kind has; `waiting` only where a model talks with an environment."""
    found = {f.name: getattr(event, f.name) for f in fields_of(event) if f.name not in OWN}
    if found.get("conversation", ...) is None:
        found.pop("waiting", None)
    return tuple(found.items())


# ---------------------------------------------------------------------------------------------------- as JSON


def plan_json(plan: Plan, id: str, rank: int | None = None) -> dict[str, Any]:
    """The whole plan, or what concerns one rank. id: of the plan."""
    body: Sequence[Item] = plan.body
    if rank is not None:
        check_rank(plan, rank)
        body = schedule(plan.body, plan.meshes, rank)
    header, places = plan.header, PlaceTexts.of(plan)
    classes = plan.classes if rank is None else (class_of(plan, rank),)
    mine = {m.id for m in plan.meshes if rank is None or rank in m.members()}
    return {
        "format": FORMAT, "plan": id, "rank": rank, "program": header.program, "flow": header.flow,
        "world": header.world, "devices_per_node": header.devices_per_node, "steps": header.steps, "seed": header.seed,
        "compiler": header.compiler, "params": dict(header.params),
        "sources": [{"path": path, "sha256": digest} for path, digest in header.sources],
        "meshes": [asdict(m) for m in plan.meshes if m.id in mine],
        "layouts": [asdict(x) for x in plan.layouts if x.mesh in mine],
        "spreads": [asdict(s) for s in plan.spreads if s.mesh in mine],
        "models": [{"name": m.name, "kind": m.head_name, "path": m.path, "dtype": m.dtype,
                    "train_layout": m.train_layout,
                    "follows": list(dict.fromkeys(m.updated_from)), "lora": m.lora.r if m.lora else 0}
                   for m in plan.models],
        "data": [{"name": d.name, "format": d.format, "path": d.path, "rows": d.row_format, "batch": d.batch}
                 for d in plan.data],
        "classes": [asdict(c) for c in classes],
        "body": [_item(plan, places, item) for item in body],
    }


def event_json(plan: Plan, id: str, number: int, source: str = "") -> dict[str, Any]:
    """One event. source: the line of the program that asked for it."""
    found = view(plan, number)
    inside = [{"kind": "loop", "id": p.id, "trips": p.trips} if isinstance(p, Loop) else
              _when(p) for p in found.inside]
    buffers = [{"buffer": t.buffer, "where": t.where, "access": "write" if t.write else "read",
                "written_by": t.written_by, "read_by": t.read_by, "freed_by": t.freed_by} for t in found.touches]
    event = _event(plan, PlaceTexts.of(plan), found.event)
    return {"format": FORMAT, "plan": id, "event": event | {"inside": inside, "source": source or None,
                                                            "buffers": buffers}}


def _when(block: When) -> dict[str, Any]:
    return {"kind": "when", "period": block.period, "after": block.after, "first": block.first}


def _item(plan: Plan, places: PlaceTexts, item: Item) -> dict[str, Any]:
    if isinstance(item, Event):
        return _event(plan, places, item)
    head = _when(item) if isinstance(item, When) else {
        "kind": "loop", "id": item.id, "trips": item.trips, "until": item.until, "over": item.over, "first": item.first}
    return head | {"body": [_item(plan, places, inner) for inner in item.body]}


def _event(plan: Plan, places: PlaceTexts, event: Event) -> dict[str, Any]:
    """bytes: null where the lengths of a run decide."""
    own = {name: value for name, value in asdict(event).items() if name not in OWN}
    return {"id": event.id, "kind": event.kind, "about": event.subject, "where": places.where(event),
            "mesh": event.mesh, "ranks": ranges(plan, event), "reads": event.reads,
            "writes": event.writes, "at": event.at, "because": event.because,
            "ahead": event.ahead, "bytes": None if event.bytes < 0 else event.bytes, "fields": own}
