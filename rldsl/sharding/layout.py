"""Coordinates of ranks in a layout, and the groups of its axes.

In: a `Layout`, its `Mesh`, ranks. Out: coordinates, groups of ranks.
Invariant: the ranks of a mesh have all coordinates of its layout, each once, in their order; the groups of one axis
cover every rank of the mesh exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Mesh

AxisName = Literal["tp", "pp", "dp", "cp", "ep", "expert_dp", "mesh"]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Position of a rank along each degree, slowest first."""

    pp: int  # pipeline stage
    dp: int  # data-parallel rank
    cp: int  # context-parallel rank
    tp: int  # tensor-parallel rank


def degree_product(layout: Layout) -> int:
    """Number of ranks that the degrees of `layout` fill."""
    return layout.pp * layout.dp * layout.cp * layout.tp


def coordinate(layout: Layout, mesh: Mesh, rank: int) -> Coordinate:
    """The coordinate of global `rank`, which must belong to `mesh`. Errors: InternalError if it does not."""
    members = _members(layout, mesh)
    if rank not in members:
        raise internal_error(f"rank {rank} is not in mesh {mesh.id}", place="layouts")
    index, tp = divmod(members.index(rank), layout.tp)
    index, cp = divmod(index, layout.cp)
    pp, dp = divmod(index, layout.dp)
    return Coordinate(pp, dp, cp, tp)


def dp_index(layout: Layout, index: int) -> int:
    """The dp coordinate of the `index`th rank of the mesh."""
    return index // (layout.cp * layout.tp) % layout.dp


def axis_ranks(layout: Layout, mesh: Mesh, axis: AxisName) -> tuple[tuple[int, ...], ...]:
    """All groups of an axis: one for each combination of the other coordinates, in the order of these; members run
    along the axis. "mesh" is the one group of all ranks, in rank order of the mesh. "ep" cuts the groups of dp into
    runs of ep ranks; "expert_dp" groups the ranks at the same position of these runs."""
    members = _members(layout, mesh)
    if axis == "mesh":
        return (members,)
    if axis == "ep":
        runs = range(0, layout.dp, layout.ep)
        return tuple(g[i : i + layout.ep] for g in axis_ranks(layout, mesh, "dp") for i in runs)
    if axis == "expert_dp":
        return tuple(g[i :: layout.ep] for g in axis_ranks(layout, mesh, "dp") for i in range(layout.ep))
    names = ("pp", "dp", "cp", "tp")
    degrees = tuple(getattr(layout, name) for name in names)
    along = names.index(axis)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in zip(members, product(*map(range, degrees)), strict=True):
        groups.setdefault(at[:along] + at[along + 1 :], []).append(rank)
    return tuple(tuple(groups[key]) for key in sorted(groups))


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """The layers of stage `stage` of `pp`: [stage*layers//pp, (stage+1)*layers//pp)."""
    if not 0 <= stage < pp:
        raise internal_error(f"there is no stage {stage} of {pp}", place="layouts")
    return range(stage * layers // pp, (stage + 1) * layers // pp)


def layer_stage(layers: int, pp: int, layer: int) -> int:
    """The stage that holds `layer`: the inverse of `stage_layers`."""
    if not 0 <= layer < layers:
        raise internal_error(f"there is no layer {layer} of {layers}", place="layouts")
    return ((layer + 1) * pp - 1) // layers


def own_layers(layers: int, layout: Layout, pp_rank: int) -> tuple[int, ...]:
    """The layers of the ranks at a coordinate along pp: chunk c is virtual stage c * pp + pp_rank of pp * vpp."""
    return _layers_of(layers, layout.pp, layout.vpp, pp_rank)


@cache
def _layers_of(layers: int, pp: int, vpp: int, rank: int) -> tuple[int, ...]:
    count = pp * vpp
    return tuple(layer for stage in range(rank, count, pp) for layer in stage_layers(layers, count, stage))


def _members(layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    members = mesh.members()
    check_mesh(layout, mesh)
    return members


def check_mesh(layout: Layout, mesh: Mesh) -> None:
    """`mesh` must be the mesh of `layout`, and filled by it. Errors: InternalError if it is not."""
    if layout.mesh != mesh.id:
        raise internal_error(f"layout {layout.id} is on mesh {layout.mesh}, not {mesh.id}", place="layouts")
    if degree_product(layout) != sum(stop - start for start, stop in mesh.ranks):
        raise internal_error(f"layout {layout.id} does not fill mesh {mesh.id}", place="layouts")
