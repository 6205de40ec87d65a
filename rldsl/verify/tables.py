"""What every check shares: the plan's records by id, its events in order, and how to name a problem.

In: a plan. Out: `Tables`. Invariant: once `references.check_references` finds nothing, every look-up here succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rldsl.diag import Diagnostic
from rldsl.plan.entries import EntrySpace, entry_spaces
from rldsl.plan.events import Event
from rldsl.plan.expr import Program
from rldsl.plan.function import Function
from rldsl.plan.model import Data, Layout, Mesh, Model, Plan, RankClass, Spread, Value
from rldsl.plan.notation import ranges_text
from rldsl.plan.projection import Path, to_ranges, walk
from rldsl.plan.spaces import IndexedFrame, indexed_frames
from rldsl.sharding.rank_sets import Ranks


@dataclass(frozen=True, slots=True)
class Tables:
    """The records of a plan by id or name; of an id that occurs twice, the last."""

    plan: Plan  # the plan
    events: tuple[tuple[Event, Path], ...]  # with the blocks around each, in order
    meshes: Mapping[str, Mesh]  # by id
    ranks: Mapping[str, Ranks]  # mesh -> those of its ranks that are in the world
    layouts: Mapping[str, Layout]  # by id
    spreads: Mapping[str, Spread]  # by id
    models: Mapping[str, Model]  # by name
    data: Mapping[str, Data]  # by name
    frames: Mapping[str, IndexedFrame]  # by id
    values: Mapping[str, Value]  # by id
    functions: Mapping[str, Function]  # by id
    programs: Mapping[str, Program]  # by id
    entries: Mapping[str, EntrySpace]  # by name

    def event_ranks(self, event: Event) -> Ranks:
        return self.ranks[event.mesh]

    def layout_ranks(self, layout: str) -> Ranks:
        return self.ranks[self.layouts[layout].mesh]

    def spread_ranks(self, spread: str) -> Ranks:
        return self.ranks[self.spreads[spread].mesh]

    def at_top(self, event: Event) -> bool:
        """Whether it is in the step loop itself, in no block of it."""
        return all(len(path) == 1 for e, path in self.events if e is event)


def tables(plan: Plan) -> Tables:
    return Tables(
        plan,
        tuple(walk(plan.body)),
        {m.id: m for m in plan.meshes},
        {m.id: Ranks.of(m.ranks, plan.header.world) for m in plan.meshes},
        {x.id: x for x in plan.layouts},
        {s.id: s for s in plan.spreads},
        {m.name: m for m in plan.models},
        {d.name: d for d in plan.data},
        indexed_frames(plan),
        {v.id: v for v in plan.values},
        {f.id: f for f in plan.functions},
        {p.id: p for p in plan.programs},
        entry_spaces(plan.values),
    )


def class_ranks(c: RankClass, world: int) -> Ranks:
    """The ranks of a class."""
    return Ranks.of(c.ranks, world)


def name(event: Event) -> str:
    """What messages call an event: "event 4 (train, ppo.rlf:22:3)"."""
    return f"event {event.id} ({event.kind}{', ' + event.at if event.at else ''})"


RECOMPILE_HELP = ("compile the program again; if the plan was written by rlc and not edited, please report this with "
                  "the plan")


def problem(
    code: str, title: str, *events: Event, ranks: Iterable[int] = (), help: str = "", notes: Iterable[str] = ()
) -> Diagnostic:
    """A diagnostic at the first of `events` that names the others and the ranks involved. help: comes before
    `RECOMPILE_HELP`."""
    shown = ranks_label(ranks)
    others = tuple(f"and {name(e)}" for e in events[1:])
    return Diagnostic(
        code,
        title,
        place=name(events[0]) if events else "plan",
        help=f"{help}; {RECOMPILE_HELP}" if help else RECOMPILE_HELP,
        notes=(*others, *notes, *((f"ranks {shown}",) if shown else ())),
    )


def ranks_label(ranks: Iterable[int]) -> str:
    """0,1,2,5 -> "0-2,5"."""
    return ranges_text(ranks.ranges if isinstance(ranks, Ranks) else to_ranges(sorted(ranks)))
