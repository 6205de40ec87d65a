"""Joining the world of a plan: the handshake, then the communicators.

In: a plan and an initialised process group. Out: `World`, with the `Axes` of every layout that this rank is part of.
Invariant: all ranks hold the same plan, and create the same groups in the same order.
Errors: RL0702 different plans, RL0711 ranks on other machines than the plan has them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import fail
from rldsl.plan.model import Layout, Mesh, Plan, Spread
from rldsl.plan.notation import ranks_text
from rldsl.runtime.backend import Axes, Axis
from rldsl.runtime.comm.agreement import ranks_that_differ
from rldsl.sharding.layout import axis_ranks

NAME = 64  # bytes of a host's name that ranks compare


def check_same_plan(data: bytes, device: torch.device) -> None:
    """Every rank's digest against every other's: 32 bytes each."""
    if other := ranks_that_differ(data, device):
        raise fail("RL0702", f"ranks {other} have a different plan than rank 0",
                   help="use one plan file that every machine can read")


def gather_hosts(name: str, device: torch.device) -> list[str]:
    """The host of every rank, in their order, from the name of this rank's: one small all-gather. What is too long is
    told apart by its digest."""
    text = name.encode()
    if len(text) > NAME:
        text = text[: NAME - 17] + b"~" + sha256(text).hexdigest()[:16].encode()
    mine = torch.tensor(list(text.ljust(NAME, b"\0")), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace") for x in every]


def check_hosts(plan: Plan, found: Sequence[str], name: str) -> str:
    """Whether the ranks are on the machines that the plan has them on: node i is the ranks i * devices_per_node and on.
    Nodes of the plan that share a machine only make a run slower, so they are a note, which is returned ("": none).
    found: the host of each rank. RL0711: the ranks of one node are on several machines."""
    size = plan.header.devices_per_node
    nodes = [tuple(range(a, min(a + size, len(found)))) for a in range(0, len(found), size)]
    torn = [ranks for ranks in nodes if len({found[r] for r in ranks}) > 1]
    if torn:
        where = [f"node {ranks[0] // size}: " + ", ".join(
            f"rank{'s' * (len(on) > 1)} {ranks_text(on)} on {host}"
            for host in dict.fromkeys(found[r] for r in ranks) if (on := [r for r in ranks if found[r] == host]))
            for ranks in torn]
        shown = (*where[:4], *([f"and {len(where) - 4} more"] if len(where) > 4 else []))
        raise fail("RL0711",
                   f"the ranks of one node of the plan run on several machines; each machine must run {size} ranks",
                   place=name, notes=shown,
                   help=f"run `torchrun --nproc-per-node {size}` on each machine, or compile for a `cluster` whose "
                        "`gpus` is the number of ranks per machine")
    if len(nodes) > 1 and len(set(found)) == 1:
        return f"all {len(nodes)} nodes of the plan run on one machine, {found[0]}: use this only for development"
    on = {host: [ranks[0] // size for ranks in nodes if found[ranks[0]] == host] for host in dict.fromkeys(found)}
    shared = [f"nodes {ranks_text(ids)} are all on {host}" for host, ids in on.items() if len(ids) > 1]
    return f"{'; '.join(shared)}: the plan assumes separate machines" if shared else ""


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place in a plan."""

    rank: int
    device: torch.device
    meshes: Mapping[str, Mesh]
    layouts: Mapping[str, Layout]
    groups: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    _axes: dict[str, Axes] = field(default_factory=dict, repr=False)  # of layouts, found once: there may be many ranks

    def group(self, mesh: str) -> Any:
        """The communicator of all ranks of a mesh; None for one rank."""
        return self._of(self.meshes[mesh].members())

    def _of(self, ranks: tuple[int, ...]) -> Any:
        """A missing group is a mistake of the plan: taken for one rank, sums would be wrong, and nobody would know."""
        return None if len(ranks) == 1 else self.groups[ranks]

    def axes(self, layout: Layout) -> Axes:
        if layout.id not in self._axes:
            mesh = self.meshes[layout.mesh]
            names = ("dp", "tp", "pp", "cp", "mesh", "ep", "copies")
            self._axes[layout.id] = Axes(**{name: self._axis(layout, mesh, name) for name in names})
        return self._axes[layout.id]

    def _axis(self, layout: Layout, mesh: Mesh, axis: str) -> Axis:
        ranks = next(ranks for ranks in axis_ranks(layout, mesh, axis) if self.rank in ranks)
        return Axis(ranks, ranks.index(self.rank), self._of(ranks))

    def dp(self, spread: Spread) -> int:
        return self.layouts[spread.layout].dp if spread.layout else 1


def join(plan: Plan, rank: int, device: torch.device, timeout: timedelta | None = None) -> World:
    """Create the plan's groups; a set of ranks that occurs twice gets one group. timeout: of each; they do not take
    over that of the world."""
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
                # of a mesh with an order of its own
                more = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
                groups[ranks] = dist.new_group(list(ranks), timeout=timeout, **more)
    return World(rank, device, meshes, layouts, groups)
