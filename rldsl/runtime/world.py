"""Joining the world of a plan: the handshake, then the communicators.

In: a plan and an initialised process group. Out: `World`, with the `Axes` of every layout that this rank is part of.
Invariant: all ranks hold the same plan, and create the same groups in the same order.
Errors: RL0701 wrong number of ranks, RL0702 different plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import fail
from rldsl.plan.layout import axis_ranks
from rldsl.plan.model import Layout, Mesh, Plan, Spread
from rldsl.runtime.backend import Axes, Axis


def check_size(plan: Plan, started: int, name: str) -> None:
    """Before anything else: a wrong world can neither run nor agree on anything."""
    if started != plan.header.world:
        raise fail("RL0701", f"the plan needs {plan.header.world} ranks, torchrun started {started}", place=name,
                   help=f"torchrun --nproc-per-node {plan.header.world} -m rldsl.run {name}, "
                        "or compile for another cluster")


def check_same_plan(data: bytes, device: torch.device) -> None:
    """Every rank's digest against every other's: 32 bytes each."""
    mine = torch.tensor(list(sha256(data).digest()), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    other = [rank for rank, digest in enumerate(every) if not torch.equal(digest, every[0])]
    if other:
        raise fail("RL0702", f"ranks {other} have another plan than rank 0",
                   help="copy one plan file to a place that every machine reads")


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place in a plan."""

    rank: int
    device: torch.device
    meshes: Mapping[str, Mesh]
    layouts: Mapping[str, Layout]
    groups: Mapping[tuple[int, ...], Any] = field(default_factory=dict)

    def group(self, mesh: str) -> Any:
        """The communicator of all ranks of a mesh; None for one rank."""
        return self.groups.get(self.meshes[mesh].members())

    def axes(self, layout: Layout) -> Axes:
        mesh = self.meshes[layout.mesh]
        return Axes(**{axis: self._axis(layout, mesh, axis) for axis in ("dp", "tp", "pp", "mesh")})

    def _axis(self, layout: Layout, mesh: Mesh, axis: str) -> Axis:
        ranks = next(ranks for ranks in axis_ranks(layout, mesh, axis) if self.rank in ranks)
        return Axis(ranks, ranks.index(self.rank), self.groups.get(ranks))

    def dp(self, spread: Spread) -> int:
        return self.layouts[spread.layout].dp if spread.layout else 1


def join(plan: Plan, rank: int, device: torch.device) -> World:
    """Create the plan's groups, equal sets of ranks once."""
    meshes = {m.id: m for m in plan.meshes}
    layouts = {x.id: x for x in plan.layouts}
    groups: dict[tuple[int, ...], Any] = {}
    for group in plan.groups:
        if group.axis == "mesh":
            sets = (meshes[group.mesh or layouts[group.layout].mesh].members(),)
        else:
            layout = layouts[group.layout]
            sets = axis_ranks(layout, meshes[layout.mesh], group.axis)
        for ranks in sets:
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
    return World(rank, device, meshes, layouts, groups)
