"""Ranks that do the same at the same times, so that a simulation follows one of each.

In: a plan. Out: for each rank the number of its class. Two ranks share one if they take part in the same events, stand
at the same stage of every pipeline, and the groups in which they meet others hold the same classes at the same places
(the coarsest such division: colour refinement, Paige & Tarjan 1987).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rldsl.plan.events import Generate, Infer, Log, Train
from rldsl.plan.model import Layout, Mesh, Plan, Ranges
from rldsl.plan.projection import events, to_ranges
from rldsl.sharding.layout import axis_ranks

Members = tuple[int, ...]  # classes
MANY = 64  # classes: with more, the few ranks that log are as others, though it is they who are waited for; from one
# rank that differs, the places in groups of many sizes may tell every other apart


@dataclass(frozen=True, slots=True)
class Classes:
    """of: rank -> class. ranks: class -> its ranks. first: class -> the rank that stands for it."""

    of: tuple[int, ...]
    ranks: tuple[Ranges, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    def among(self, ranks: tuple[int, ...]) -> Members:
        """The classes of some ranks, in the order of these, each once."""
        return tuple(dict.fromkeys(self.of[r] for r in ranks))


def classes(plan: Plan, apart: bool = False) -> Classes:
    """apart: every rank is a class of its own."""
    colour = list(range(plan.header.world)) if apart else _refined(plan)
    if not apart and len(set(colour)) > MANY:
        colour = _refined(plan, {e.id for e, _ in events(plan) if isinstance(e, Log)})
    by: dict[int, list[int]] = {}
    for rank, c in enumerate(colour):
        by.setdefault(c, []).append(rank)
    number = {c: i for i, c in enumerate(by)}
    return Classes(tuple(number[c] for c in colour), tuple(to_ranges(r) for r in by.values()),
                   tuple(r[0] for r in by.values()), tuple(len(r) for r in by.values()))


def called(plan: Plan) -> dict[str, Layout]:
    """The layouts under which calls run."""
    layouts = {x.id: x for x in plan.layouts}
    return {e.layout: layouts[e.layout] for e, _ in events(plan) if isinstance(e, Generate | Infer | Train)}


def _refined(plan: Plan, without: Collection[int] = ()) -> list[int]:
    """without: events."""
    colour, same = [0] * plan.header.world, dict[tuple[int, ...], int]()  # classes of a plan may differ in peaks alone
    for c in plan.classes:
        for start, stop in c.ranks:
            number = same.setdefault(tuple(e for e in c.events if e not in without), len(same))
            colour[start:stop] = [number] * (stop - start)
    meshes = {m.id: m for m in plan.meshes}
    groups = [(axis == "pp", axis_ranks(layout, meshes[layout.mesh], axis))
              for layout in called(plan).values() for axis in ("pp", "tp", "cp", "dp", *_of_experts(layout))]
    while True:
        signs: list[list[object]] = [[c] for c in colour]
        for ordered, every in groups:
            for group in every:
                held = tuple(colour[r] for r in group)
                met = held if ordered else frozenset(held)
                for place, rank in enumerate(group):
                    signs[rank].append((met, place) if ordered else met)
        known: dict[tuple[object, ...], int] = {}
        finer = [known.setdefault(tuple(s), len(known)) for s in signs]
        if len(known) == len(set(colour)):
            return finer
        colour = finer


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a layout as one class sees them ("pp", "tp", "cp", "dp", "mesh", and "shard": the ranks that work
    on the same rows; with ep also "ep" and "copies"): the classes in each, the number of ranks, whether one of the
    layout's groups of that axis lies on several nodes. stage: of the pipeline."""

    members: dict[str, Members]
    sizes: dict[str, int]
    crosses: dict[str, bool]
    stage: int


def groups(layout: Layout, mesh: Mesh, found: Classes, per_node: int) -> dict[int, Groups]:
    """Class -> its groups, for the classes on the layout's mesh."""
    made: dict[int, Groups] = {}
    size = layout.dp * layout.cp * layout.tp
    for place, rank in enumerate(mesh.members()):
        made.setdefault(found.of[rank], Groups({}, {}, {}, place // size))
    for axis in ("pp", "tp", "cp", "dp", "mesh", "shard", *_of_experts(layout)):
        every = _shards(layout, mesh) if axis == "shard" else axis_ranks(layout, mesh, axis)
        crosses = any(len({r // per_node for r in g}) > 1 for g in every)  # in whatever order its ranks are
        for group in every:
            for c in (here := found.among(group)):
                if axis not in made[c].members:
                    made[c].members[axis] = here
                    made[c].sizes[axis] = len(group)
                    made[c].crosses[axis] = crosses
    return made


def _of_experts(layout: Layout) -> tuple[str, ...]:
    return ("ep", "copies") if layout.ep > 1 else ()


def _shards(layout: Layout, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """The ranks that work on the same rows."""
    members, inner = mesh.members(), layout.cp * layout.tp
    size = layout.dp * inner
    return tuple(tuple(members[p * size + d * inner + i] for p in range(layout.pp) for i in range(inner))
                 for d in range(layout.dp))
