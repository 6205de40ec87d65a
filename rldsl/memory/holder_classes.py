"""Classes of ranks that hold the same: those on the same meshes, at the same stages of the same layouts.

In: a plan. Out: `HolderClass`es. They are computed on ranges, so their number and cost depend on the plan and not on
the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from rldsl.plan.model import Layout, Mesh, Plan, Ranges
from rldsl.reshard.node_groups import MeshView
from rldsl.sharding.boxes import Cell, num_parts
from rldsl.sharding.rank_classes import ranks_by_membership

Place = tuple[str, str, int]  # a mesh, or a layout and one of its stages


@dataclass(frozen=True, slots=True)
class HolderClass:
    """Ranks that hold the same at all times. Under `zero` every shard counts as the first, which holds most."""

    ranks: Ranges
    meshes: frozenset[str]  # the meshes that contain these ranks
    cells: tuple[Mapping[str, Cell], ...]  # layout -> cell, for each combination of tensor- and expert-parallel parts

    def stage(self, layout: str) -> int:
        return self.cells[0][layout].pp_rank

    def at(self, layout: str) -> tuple[Cell, ...]:
        """The cells of one layout; none if these ranks are not part of it."""
        return tuple(dict.fromkeys(c[layout] for c in self.cells if layout in c))


def classes(plan: Plan) -> tuple[HolderClass, ...]:
    """All ranks of the world, in the order of their first ranks."""
    world, meshes = plan.header.world, {m.id: m for m in plan.meshes}
    places: dict[Place, Ranges] = {("mesh", m.id, 0): m.ranks for m in plan.meshes}
    for x in plan.layouts:
        size = x.dp * x.cp * x.tp
        places |= {("stage", x.id, stage): _stretch(meshes[x.mesh], stage * size, (stage + 1) * size)
                   for stage in range(x.pp)}
    sides = {x.id: MeshView.of(x, meshes[x.mesh]) for x in plan.layouts}
    return tuple(_made(plan, mine, ranges, sides) for mine, ranges in ranks_by_membership(places, world).items())


def _made(plan: Plan, mine: frozenset[Place], ranges: Ranges, sides: Mapping[str, MeshView]) -> HolderClass:
    stages = {id: stage for kind, id, stage in mine if kind == "stage"}
    layouts = [x for x in plan.layouts if x.id in stages]
    cells = dict.fromkeys(tuple((x.id, Cell(stages[x.id], _part(sides[x.id], rank))) for x in layouts)
                          for rank in _samples(ranges, layouts))
    return HolderClass(ranges, frozenset(id for kind, id, _ in mine if kind == "mesh"), tuple(map(dict, cells)))


def _part(side: MeshView, rank: int) -> int:
    at = side.cell(rank)
    assert at is not None, f"rank {rank} is not on the mesh"
    return at.part


def _samples(ranges: Ranges, layouts: list[Layout]) -> Iterator[int]:
    """Ranks that cover every part that occurs in the ranges: parts repeat along a range."""
    period = lcm(1, *(num_parts(x) for x in layouts))
    for start, stop in ranges:
        yield from range(start, min(stop, start + period))


def _stretch(mesh: Mesh, first: int, last: int) -> Ranges:
    """The ranks at positions first to last - 1 of a mesh."""
    found, at = [], 0
    for start, stop in mesh.ranks:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(found)
