"""Classes of ranks that do the same at the same times, so that the simulator follows one rank of each.

In: a plan. Out: the class of each rank. Two ranks share a class if they take part in the same events, are at the same
stage of every pipeline, and the groups of their collectives hold the same classes at the same positions (the coarsest
such partition: color refinement, Paige & Tarjan 1987).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rldsl.plan.events import ModelCall
from rldsl.plan.model import Layout, Mesh, Plan, Ranges
from rldsl.plan.projection import event_paths, to_ranges
from rldsl.sharding.layout import AxisName, axis_ranks

Members = tuple[int, ...]  # classes
# With more classes than this, ranks that log count as the others, though others wait for them: one rank that differs
# can, through groups of many sizes, end up separating every rank from every other.
MAX_CLASSES = 64


@dataclass(frozen=True, slots=True)
class Classes:
    """A partition of all ranks into classes."""

    of: tuple[int, ...]  # rank -> class
    ranks: tuple[Ranges, ...]  # class -> its ranks
    first: tuple[int, ...]  # class -> the rank that represents it
    sizes: tuple[int, ...]  # class -> how many ranks it has

    def among(self, ranks: tuple[int, ...]) -> Members:
        """The classes of some ranks, each once, in the order of the ranks."""
        return tuple(dict.fromkeys(self.of[r] for r in ranks))


def build_classes(plan: Plan, per_rank: bool = False) -> Classes:
    """The classes of a plan. per_rank: every rank is a separate class."""
    color = list(range(plan.header.world)) if per_rank else _refine_colors(plan)
    if not per_rank and len(set(color)) > MAX_CLASSES:
        color = _refine_colors(plan, {e.id for e, _ in event_paths(plan) if e.logged})
    by: dict[int, list[int]] = {}
    for rank, c in enumerate(color):
        by.setdefault(c, []).append(rank)
    number = {c: i for i, c in enumerate(by)}
    return Classes(tuple(number[c] for c in color), tuple(to_ranges(r) for r in by.values()),
                   tuple(r[0] for r in by.values()), tuple(len(r) for r in by.values()))


def call_layouts(plan: Plan) -> dict[str, Layout]:
    """The layouts under which calls run."""
    layouts = {x.id: x for x in plan.layouts}
    return {e.layout: layouts[e.layout] for e, _ in event_paths(plan) if isinstance(e, ModelCall)}


def _refine_colors(plan: Plan, without: Collection[int] = ()) -> list[int]:
    """Rank -> color, after refinement. without: events that do not count."""
    color, same = [0] * plan.header.world, dict[tuple[int, ...], int]()  # a plan's classes may differ only in peaks
    for c in plan.classes:
        for start, stop in c.ranks:
            number = same.setdefault(tuple(e for e in c.events if e not in without), len(same))
            color[start:stop] = [number] * (stop - start)
    meshes = {m.id: m for m in plan.meshes}
    groups = [(axis == "pp", axis_ranks(layout, meshes[layout.mesh], axis))
              for layout in call_layouts(plan).values() for axis in _axes(layout)]
    while True:
        signatures: list[list[object]] = [[c] for c in color]
        for ordered, every in groups:
            for group in every:
                held = tuple(color[r] for r in group)
                met = held if ordered else frozenset(held)
                for place, rank in enumerate(group):
                    signatures[rank].append((met, place) if ordered else met)
        known: dict[tuple[object, ...], int] = {}
        finer = [known.setdefault(tuple(s), len(known)) for s in signatures]
        if len(known) == len(set(color)):
            return finer
        color = finer


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a layout as one class sees them, by axis: "pp", "tp", "cp", "dp", "mesh", and "dp_rank" (the
    ranks that work on the same rows); with ep also "ep", and "expert_dp" (the ranks that hold the same experts)."""

    members: dict[str, Members]  # axis -> the classes in its group
    sizes: dict[str, int]  # axis -> ranks in a group
    crosses: dict[str, bool]  # axis -> whether any of the layout's groups spans several nodes
    stage: int  # of the pipeline


def build_groups(layout: Layout, mesh: Mesh, found: Classes, per_node: int) -> dict[int, Groups]:
    """Class -> its groups, for the classes on the layout's mesh."""
    made: dict[int, Groups] = {}
    size = layout.dp * layout.cp * layout.tp
    for place, rank in enumerate(mesh.members()):
        made.setdefault(found.of[rank], Groups({}, {}, {}, place // size))
    by_axis: dict[str, tuple[tuple[int, ...], ...]] = {axis: axis_ranks(layout, mesh, axis)
                                                       for axis in ("mesh", *_axes(layout))}
    for axis, every in {**by_axis, "dp_rank": _dp_ranks(layout, mesh)}.items():
        crosses = any(len({r // per_node for r in g}) > 1 for g in every)  # in whatever order its ranks are
        for group in every:
            for c in (here := found.among(group)):
                if axis not in made[c].members:
                    made[c].members[axis] = here
                    made[c].sizes[axis] = len(group)
                    made[c].crosses[axis] = crosses
    return made


def _axes(layout: Layout) -> tuple[AxisName, ...]:
    return ("pp", "tp", "cp", "dp", "ep", "expert_dp") if layout.ep > 1 else ("pp", "tp", "cp", "dp")


def _dp_ranks(layout: Layout, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """For each dp rank, its ranks: those that work on the same rows."""
    members, inner = mesh.members(), layout.cp * layout.tp
    size = layout.dp * inner
    return tuple(tuple(members[p * size + d * inner + i] for p in range(layout.pp) for i in range(inner))
                 for d in range(layout.dp))
