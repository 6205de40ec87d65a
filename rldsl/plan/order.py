"""The order of a whole run, and who needs whom in it.

In: a plan. Out: the place of each run of each event, which can be compared between ranks; the ranks without which
another cannot end an event. """

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rldsl.plan.dumps import Moment
from rldsl.plan.events import (Checkpoint, Collect, Event, Every, Fetch, Free, Generate, Infer, Item, Lengths, Load,
                               Log, Loop, Offload, Onload, Realloc, Save, Select, Train, Transfer, split)
from rldsl.plan.layout import coordinate
from rldsl.plan.model import Layout, Plan

Place = tuple[int, ...]  # index, turn, index, ... of the blocks and the event, and at last 0 in the event, 1 after it
START, END = (-1,), (1 << 62,)
ALONE = (Load, Fetch, Offload, Onload, Select, Collect, Free)  # each rank does these by itself
POSTED = (Transfer, Realloc)  # issued here, waited for later
TOGETHER = (Lengths, Train, Save, Checkpoint)  # no rank ends these before all have begun them


class Order:
    """events: by their numbers."""

    def __init__(self, plan: Plan):
        self._meshes = {m.id: m for m in plan.meshes}
        self._members = {m.id: m.members() for m in plan.meshes}
        self._sets = {id: frozenset(ranks) for id, ranks in self._members.items()}
        self._layouts, self._spreads = {x.id: x for x in plan.layouts}, {s.id: s for s in plan.spreads}
        self._ways: dict[int, tuple[tuple[int, bool], ...]] = {}  # to each event: indices, and whether a turn follows
        self.events: dict[int, Event] = {}
        self._note(plan.body, ())
        self._together = [e for id, e in self.events.items() if isinstance(e, TOGETHER) and len(self._ways[id]) == 2]

    def _note(self, items: Sequence[Item], way: tuple[tuple[int, bool], ...]) -> None:
        for i, item in enumerate(items):
            if isinstance(item, Loop | Every):
                self._note(item.body, (*way, (i, isinstance(item, Loop))))
            else:
                self._ways[item.id], self.events[item.id] = (*way, (i, False)), item

    def place(self, at: Moment | None, after: bool = False) -> Place:
        """at: None is the end of the run. What the plan does not have is before everything."""
        if at is None:
            return END
        turns, place = list(at.turns), []
        for index, loop in self._ways.get(at.event, ()):
            place += [index, turns.pop(0) if turns else 0] if loop else [index]
        return (*place, int(after)) if place else START

    def ended(self, at: Moment, place: Place, rank: int) -> dict[Moment, frozenset[int]]:
        """What `rank`, which is at `at`, has ended before `place` in this step or the one before, and nobody ends
        before all have begun it; and who takes part."""
        steps = [at.turns[:1], (at.turns[0] - 1,)] if at.turns and at.turns[0] > 1 else [at.turns[:1]]
        runs = ((Moment(e.id, step), self._sets[e.mesh]) for e in self._together for step in steps)
        return {run: ranks for run, ranks in runs if rank in ranks and self.place(run) < place}

    def partners(self, event: Event, rank: int) -> tuple[int, ...]:
        """The other ranks without which `rank` cannot end the event."""
        ranks: Iterable[int] = self._members[event.mesh]
        if rank not in self._sets[event.mesh] or isinstance(event, ALONE):
            return ()
        if isinstance(event, Generate | Infer):
            ranks = self._replica(self._layouts[event.layout], rank)
        elif isinstance(event, Transfer):
            ranks = self._across(self._spreads[event.src].mesh, self._spreads[event.dst].mesh, rank)
        elif isinstance(event, Realloc):
            ranks = self._across(self._layouts[event.src].mesh, self._layouts[event.dst].mesh, rank)
        elif isinstance(event, Log):
            firsts = {self._members[self._spreads[split(b)[1]].mesh][0] for _, b in event.metrics}
            ranks = firsts if rank == event.to else {event.to} if rank in firsts else ()
        return tuple(sorted(q for q in ranks if q != rank))

    def _replica(self, layout: Layout, rank: int) -> Iterable[int]:
        """The ranks that work on the same rows: those of one dp shard."""
        mesh = self._meshes[layout.mesh]
        mine = coordinate(layout, mesh, rank).dp
        return (q for q in mesh.members() if coordinate(layout, mesh, q).dp == mine)

    def _across(self, src: str, dst: str, rank: int) -> Iterable[int]:
        """Who receives needs who sends, and the other way round: a send waits for its receive."""
        here, there = self._members[src], self._members[dst]
        return {*(here if rank in there else ()), *(there if rank in here else ())}
