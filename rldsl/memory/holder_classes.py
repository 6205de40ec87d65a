"""Classes of ranks that hold the same: those on the same meshes, with the same pp ranks in the same layouts.

In: a plan. Out: `HolderClass`es. They are computed on ranges, so their number and cost depend on the plan and not on
the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Mesh, Plan, Ranges
from rldsl.reshard.node_groups import MeshView
from rldsl.sharding.boxes import Cell, num_parts
from rldsl.sharding.rank_classes import ranks_by_membership

RankSet = tuple[str, str, int]  # ("mesh", its id, 0), or ("stage", a layout's id, a pp rank): all ranks of either


@dataclass(frozen=True, slots=True)
class HolderClass:
    """Ranks that hold the same at all times. Under `zero` every zero shard counts as the first, which holds most."""

    ranks: Ranges  # ascending
    meshes: frozenset[str]  # the meshes that contain these ranks
    cells: tuple[Mapping[str, Cell], ...]  # layout -> cell, for each combination of tensor- and expert-parallel parts

    def pp_rank(self, layout: str) -> int:
        return self.cells[0][layout].pp_rank

    def at(self, layout: str) -> tuple[Cell, ...]:
        """The cells of one layout; none if these ranks are not part of it."""
        return tuple(dict.fromkeys(c[layout] for c in self.cells if layout in c))


def classes(plan: Plan) -> tuple[HolderClass, ...]:
    """All ranks of the world, in the order of their first ranks."""
    world, meshes = plan.header.world, {m.id: m for m in plan.meshes}
    rank_sets: dict[RankSet, Ranges] = {("mesh", m.id, 0): m.ranks for m in plan.meshes}
    for x in plan.layouts:
        size = x.dp * x.cp * x.tp
        rank_sets |= {("stage", x.id, pp_rank): _ranks_at(meshes[x.mesh], pp_rank * size, (pp_rank + 1) * size)
                      for pp_rank in range(x.pp)}
    views = {x.id: MeshView.of(x, meshes[x.mesh]) for x in plan.layouts}
    return tuple(_holder_class(plan, members, ranges, views)
                 for members, ranges in ranks_by_membership(rank_sets, world).items())


def _holder_class(plan: Plan, members: frozenset[RankSet], ranges: Ranges,
                  views: Mapping[str, MeshView]) -> HolderClass:
    """The class of the ranks `ranges`, which are in the sets `members` and in no others."""
    pp_ranks = {id: pp_rank for kind, id, pp_rank in members if kind == "stage"}
    layouts = [x for x in plan.layouts if x.id in pp_ranks]
    cells = dict.fromkeys(tuple((x.id, Cell(pp_ranks[x.id], _part(views[x.id], rank))) for x in layouts)
                          for rank in _samples(ranges, layouts))
    return HolderClass(ranges, frozenset(id for kind, id, _ in members if kind == "mesh"), tuple(map(dict, cells)))


def _part(view: MeshView, rank: int) -> int:
    """The part of the model that `rank` holds. Errors: InternalError for a rank that is not on the mesh."""
    if (cell := view.cell(rank)) is None:
        raise internal_error(f"rank {rank} is not on the mesh of its layout", place="memory estimate")
    return cell.part


def _samples(ranges: Ranges, layouts: list[Layout]) -> Iterator[int]:
    """Ranks that cover every part that occurs in the ranges: parts repeat along a range."""
    period = lcm(1, *(num_parts(x) for x in layouts))
    for start, stop in ranges:
        yield from range(start, min(stop, start + period))


def _ranks_at(mesh: Mesh, first: int, past: int) -> Ranges:
    """The ranks at the positions [first, past) of a mesh."""
    ranges, at = [], 0
    for start, stop in mesh.ranks:
        a, b = max(first, at), min(past, at + stop - start)
        if a < b:
            ranges.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(ranges)
