"""The order of a whole run, and who needs whom in it.

In: a plan. Out: the place of each run of each event, which can be compared between ranks; the ranks without which
another cannot end an event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

from rldsl.plan.events import Event, Item, Loop, When, runs_in, split_buffer
from rldsl.plan.model import Layout, Plan
from rldsl.plan.references import Reference, Role, named
from rldsl.postmortem.dumps import EventRun
from rldsl.sharding.layout import dp_index

# index, iteration, index, ... of the blocks and the event; then 0 in the event, or 1 after it
OrderKey = tuple[int, ...]
START, END = (-1,), (1 << 62,)


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """Ranks that need each other, in ascending order. There is one object per group, equal only to itself, so that what
    is computed for a group is computed once."""

    ranks: tuple[int, ...]  # ascending


NOBODY = RankGroup(())


class WaitOrder:
    """Who waits for whom in a plan. events: by id."""

    def __init__(self, plan: Plan):
        self._steps = plan.header.steps
        self._members = {m.id: m.members() for m in plan.meshes}
        self._sets = {id: frozenset(ranks) for id, ranks in self._members.items()}
        self._layouts, self._spreads = {x.id: x for x in plan.layouts}, {s.id: s for s in plan.spreads}
        self._groups: dict[Hashable, RankGroup] = {}
        self._dp_ranks: dict[str, dict[int, RankGroup]] = {}  # layout -> rank -> group
        # event -> (index in its block, whether an iteration follows) of each block around it, and of the event
        self._paths: dict[int, tuple[tuple[int, bool], ...]] = {}
        self.events: dict[int, Event] = {}
        self._ends: dict[int, tuple[Reference, ...]] = {}  # event -> what says who takes part in it
        self._collect(plan.body, ())
        self._barriers = [e for id, e in self.events.items()
                          if e.traits.blocking == "barrier" and len(self._paths[id]) == 2]

    def _collect(self, items: Sequence[Item], path: tuple[tuple[int, bool], ...]) -> None:
        for i, item in enumerate(items):
            if isinstance(item, Loop | When):
                self._collect(item.body, (*path, (i, isinstance(item, Loop))))
            else:
                self._paths[item.id], self.events[item.id] = (*path, (i, False)), item
                self._ends[item.id] = named(item, *item.traits.participants)

    def place(self, at: EventRun | None, after: bool = False) -> OrderKey:
        """at: None is the end of the run. What the plan does not have is before everything."""
        if at is None:
            return END
        iterations, key = list(at.turns), list[int]()
        for index, loop in self._paths.get(at.event, ()):
            key += [index, iterations.pop(0) if iterations else 0] if loop else [index]
        return (*key, int(after)) if key else START

    def ended(self, at: EventRun, place: OrderKey, rank: int) -> dict[EventRun, frozenset[int]]:
        """The barriers that `rank`, which is at `at`, has ended before `place` in this step or the one before, with the
        ranks that take part: all of these have begun them."""
        steps = [at.turns[:1], (at.turns[0] - 1,)] if at.turns and at.turns[0] > 1 else [at.turns[:1]]
        runs = ((EventRun(e.id, step), self._sets[e.mesh]) for e in self._barriers for step in steps
                if not step or runs_in(step[0], e.ahead, self._steps))
        return {run: ranks for run, ranks in runs if rank in ranks and self.place(run) < place}

    def group(self, event: Event, rank: int) -> RankGroup:
        """The ranks without which `rank` cannot end the event; it may be one of them."""
        if rank not in self._sets[event.mesh]:
            return NOBODY
        match event.traits.blocking:
            case "none":
                return NOBODY
            case "async":
                src, dst = (self._mesh(end) for end in self._ends[event.id])
                return self._across(src, dst, rank, passed_on=event.traits.forwards)
            case "dp_rank":
                layout, = (end.id for end in self._ends[event.id])
                return self._dp_rank(self._layouts[layout], rank)
            case "gather":
                firsts = {self._members[self._mesh(b)][0] for b in named(event, *event.traits.first_rank_of)}
                to, = (end.id for end in self._ends[event.id])
                receives = rank == to
                return self._known((event.id, receives), firsts if receives else (to,)) if (
                    receives or rank in firsts) else NOBODY
            case "collective" | "barrier":
                return self._known(event.mesh, self._sets[event.mesh])
            case unknown:
                assert_never(unknown)

    def _mesh(self, end: Reference) -> str:
        """The mesh of a layout, a spread, or a buffer in one."""
        id = split_buffer(end.id)[1] if end.role is Role.BUFFER else end.id
        return self._layouts[id].mesh if id in self._layouts else self._spreads[id].mesh

    def _known(self, key: Hashable, ranks: Iterable[int]) -> RankGroup:
        if key not in self._groups:
            self._groups[key] = RankGroup(tuple(sorted(ranks)))
        return self._groups[key]

    def _dp_rank(self, layout: Layout, rank: int) -> RankGroup:
        """The ranks of the same dp rank, and those that share experts with them."""
        if layout.id not in self._dp_ranks:
            dp_ranks: dict[int, list[int]] = defaultdict(list)
            for index, member in enumerate(self._members[layout.mesh]):
                dp_ranks[dp_index(layout, index) // layout.ep].append(member)
            groups = [RankGroup(tuple(sorted(ranks))) for ranks in dp_ranks.values()]
            self._dp_ranks[layout.id] = {member: group for group in groups for member in group.ranks}
        return self._dp_ranks[layout.id][rank]

    def _across(self, src: str, dst: str, rank: int, passed_on: bool = False) -> RankGroup:
        """A receiver needs the senders, and a sender the receivers: a send waits for its receive. passed_on: receivers
        may forward to other receivers."""
        sends, receives = rank in self._sets[src], rank in self._sets[dst]
        key = (src, dst, sends, receives, passed_on)
        if key not in self._groups:
            ranks = {*(self._members[src] if receives else ()),
                     *(self._members[dst] if sends or receives and passed_on else ())}
            self._groups[key] = RankGroup(tuple(sorted(ranks)))
        return self._groups[key]
