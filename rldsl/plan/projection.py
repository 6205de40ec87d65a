"""Projection: what of a plan concerns one rank. In: a plan, or its body and meshes. Out: events, schedules, classes.

Invariant: a rank's schedule is the body filtered to the events whose mesh contains the rank, in the body's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from rldsl.diag import Failure, counted, fail, internal_error
from rldsl.plan.events import Event, Item, Loop, When
from rldsl.plan.model import Mesh, Plan, Ranges, RankClass

Path = tuple[Loop | When, ...]  # the blocks around an event, outermost first


def event_paths(plan: Plan) -> Iterator[tuple[Event, Path]]:
    """Every event of the body, in order, with the blocks around it."""
    return walk(plan.body)


def walk(body: Iterable[Item], path: Path = ()) -> Iterator[tuple[Event, Path]]:
    """The same for a part of a body. path: the blocks around it."""
    for item in body:
        if isinstance(item, Loop | When):
            yield from walk(item.body, (*path, item))
        else:
            yield item, path


def of_steps(path: Path) -> Iterator[When]:
    """Those of the blocks around an event of the step loop that say in which steps it runs."""
    for block in path[1:]:
        if isinstance(block, Loop):
            return
        yield block


def times(path: Path) -> int:
    """How often a run executes an event inside these blocks: a `When` counts the iterations of the loop around it."""
    count, window = 1, Window(1)
    for block in path:
        if isinstance(block, Loop):
            count, window = count * window.count, Window(block.trips)
        else:
            window = window.within(block)
    return count * window.count


@dataclass(frozen=True, slots=True)
class Window:
    """Iterations of a loop in which all of some blocks run."""

    last: int  # none after this one
    after: int = 0  # none up to this one
    period: int = 1  # multiples of it

    def within(self, block: When) -> Window:
        return Window(min(self.last, block.first or self.last), max(self.after, block.after),
                      lcm(self.period, block.period))

    @property
    def count(self) -> int:
        return max(0, self.last // self.period - self.after // self.period)

    @property
    def latest(self) -> int:
        """The last one; 0 if there is none."""
        return self.last - self.last % self.period if self.count else 0


def last_step(path: Path) -> int:
    """The last iteration of the outermost loop in which an event inside these blocks runs; 0 if it never does. A `When`
    counts the iterations of the loop around it."""
    outer, *within = path or (Loop("", 1, ()),)
    if not isinstance(outer, Loop):
        raise internal_error("an `every` around which there is no loop")
    window = Window(outer.trips)
    while within and isinstance(block := within[0], When):
        window, within = window.within(block), within[1:]
    return window.latest if not within or times(tuple(within)) > 0 else 0


def ranges(plan: Plan, event: Event) -> Ranges:
    """The ranks that take part in `event`, as the ranges of its mesh."""
    for mesh in plan.meshes:
        if mesh.id == event.mesh:
            return mesh.ranks
    raise no_mesh(event)


def no_mesh(event: Event) -> Failure:
    """RL0610: the plan is not sound."""
    return fail("RL0610", f"event {event.id} refers to an unknown mesh {event.mesh!r}", place=f"event {event.id}",
                help="compile the program again; `rlc verify` lists all errors of a plan")


def schedule(body: Sequence[Item], meshes: Sequence[Mesh], rank: int) -> tuple[Item, ...]:
    """`body` filtered to `rank`; a block that is left empty goes too."""
    mine = {m.id for m in meshes if any(start <= rank < stop for start, stop in m.ranks)}
    return _filter(body, mine)


def _filter(body: Sequence[Item], mine: set[str]) -> tuple[Item, ...]:
    kept: list[Item] = []
    for item in body:
        if isinstance(item, Event):
            if item.mesh in mine:
                kept.append(item)
        elif inner := _filter(item.body, mine):
            kept.append(replace(item, body=inner))
    return tuple(kept)


def rank_classes(
    meshes: Sequence[Mesh], body: Sequence[Item], world: int, peaks: Mapping[int, int]
) -> tuple[RankClass, ...]:
    """Ranks with equal schedules and equal peak bytes share a class; classes in the order of their first ranks."""
    flat = [(event.id, event.mesh) for event, _ in walk(body)]
    used = {mesh for _, mesh in flat}
    meshes_of: list[set[str]] = [set() for _ in range(world)]
    for mesh in meshes:
        if mesh.id in used:
            for rank in mesh.members():
                meshes_of[rank].add(mesh.id)
    alike: dict[tuple[frozenset[str], int], list[int]] = defaultdict(list)
    for rank in range(world):
        alike[frozenset(meshes_of[rank]), peaks.get(rank, 0)].append(rank)
    merged: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
    for (mine, peak), ranks in alike.items():
        merged[tuple(id for id, mesh in flat if mesh in mine), peak] += ranks
    classes = [RankClass(to_ranges(sorted(ranks)), ids, peak) for (ids, peak), ranks in merged.items()]
    return tuple(sorted(classes, key=lambda c: c.ranks[0]))


def class_of(plan: Plan, rank: int) -> RankClass:
    """The class of `rank`; RL0541 when it has none."""
    for c in plan.classes:
        if any(start <= rank < stop for start, stop in c.ranks):
            return c
    raise fail(
        "RL0541",
        f"rank {rank} is in no class of the plan",
        place=f"rank {rank}",
        help=f"the plan is for {counted(plan.header.world, 'rank')}",
    )


def to_ranges(ranks: Iterable[int]) -> Ranges:
    """Consecutive runs, in the order given: 0, 1, 2, 5 -> ((0, 3), (5, 6))."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank:
            runs[-1] = (runs[-1][0], rank + 1)
        else:
            runs.append((rank, rank + 1))
    return tuple(runs)
