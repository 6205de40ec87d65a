"""Joining the world of a plan: the handshake, then the communicators.

In: a plan and an initialized process group. Out: `World`, with the `Axes` of every layout that this rank is part of.
Invariant: all ranks hold the same plan, and create the same groups in the same order.
Errors: RL0702 different plans, RL0710 an order of ranks that this torch cannot keep, RL0711 ranks on other machines
than the plan has them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import fail
from rldsl.plan.model import Layout, Mesh, Plan, Spread
from rldsl.plan.notation import ranks_text
from rldsl.plan.projection import event_paths
from rldsl.runtime.backend import Axes, Axis
from rldsl.runtime.collectives import all_gather
from rldsl.runtime.comm.agreement import ranks_that_differ
from rldsl.runtime.comm.machine_peers import share_memory
from rldsl.runtime.shared_memory import SharedMemoryGroup
from rldsl.sharding.layout import AxisName, axis_ranks

SPLIT_ABOVE = 64  # ranks: in larger NCCL worlds all groups of an axis are made by one split of the world
MAX_HOST_BYTES = 64  # of a host's name that ranks compare; longer ones end in a digest


def check_same_plan(data: bytes, device: torch.device) -> None:
    """Check by digests that all ranks have the same plan. Errors: RL0702."""
    if other := ranks_that_differ(data, device):
        raise fail("RL0702", f"ranks {other} have a different plan than rank 0",
                   help="use one plan file that every machine can read")


def gather_hosts(name: str, device: torch.device) -> list[str]:
    """The host of every rank, by rank, in one small all-gather. name: this rank's host. Names that are too long are
    shortened, with a digest."""
    text = name.encode()
    if len(text) > MAX_HOST_BYTES:
        text = text[: MAX_HOST_BYTES - 17] + b"~" + sha256(text).hexdigest()[:16].encode()
    padded = torch.tensor(list(text.ljust(MAX_HOST_BYTES, b"\0")), dtype=torch.uint8, device=device)
    return [bytes(x).rstrip(b"\0").decode(errors="replace") for x in all_gather(padded).tolist()]


def check_hosts(plan: Plan, hosts: Sequence[str], name: str) -> str:
    """Check that the ranks of each node of the plan run on one machine; node i is the ranks from i * devices_per_node.
    Nodes that share a machine only make a run slower: then a note is returned ("": none). hosts: of each rank. name: of
    the plan. Errors: RL0711 the ranks of one node are on several machines."""
    size = plan.header.devices_per_node
    nodes = [tuple(range(a, min(a + size, len(hosts)))) for a in range(0, len(hosts), size)]
    split_nodes = [ranks for ranks in nodes if len({hosts[r] for r in ranks}) > 1]
    if split_nodes:
        where = [f"node {ranks[0] // size}: " + ", ".join(
            f"rank{'s' * (len(on) > 1)} {ranks_text(on)} on {host}"
            for host in dict.fromkeys(hosts[r] for r in ranks) if (on := [r for r in ranks if hosts[r] == host]))
            for ranks in split_nodes]
        shown = (*where[:4], *([f"and {len(where) - 4} more"] if len(where) > 4 else []))
        raise fail("RL0711",
                   f"the ranks of one node of the plan run on several machines; each machine must run {size} ranks",
                   place=name, notes=shown,
                   help=f"run `torchrun --nproc-per-node {size}` on each machine, or compile for a `cluster` whose "
                        "`gpus` is the number of ranks per machine")
    if len(nodes) > 1 and len(set(hosts)) == 1:
        return f"all {len(nodes)} nodes of the plan run on one machine, {hosts[0]}: use this only for development"
    nodes_of = {host: [ranks[0] // size for ranks in nodes if hosts[ranks[0]] == host] for host in dict.fromkeys(hosts)}
    shared = [f"nodes {ranks_text(ids)} are all on {host}" for host, ids in nodes_of.items() if len(ids) > 1]
    return f"{'; '.join(shared)}: the plan assumes separate machines" if shared else ""


@dataclass(frozen=True, slots=True)
class World:
    """This rank's number, device and communicators."""

    rank: int  # this rank's number in the run
    device: torch.device  # on which its tensors are
    meshes: Mapping[str, Mesh]  # of the plan, by id
    layouts: Mapping[str, Layout]  # of the plan, by id
    groups: Mapping[tuple[int, ...], Any] = field(default_factory=dict)  # ranks -> torch ProcessGroup
    # gloo ProcessGroup of the ranks that log, for metrics on the host; None: the world's own group, which is gloo
    log_group: Any = None
    # the groups whose collectives go through shared memory, as long as they are held here
    shared: tuple[SharedMemoryGroup, ...] = ()
    _axes: dict[str, Axes] = field(default_factory=dict, repr=False)  # layout -> `axes`, a cache

    def group(self, mesh: str) -> Any:
        """The communicator of all ranks of a mesh; None for one rank."""
        return self._of(self.meshes[mesh].members())

    def _of(self, ranks: tuple[int, ...]) -> Any:
        """The communicator of some ranks; None for one rank. A missing group is an error in the plan (KeyError):
        treating it as a single rank would silently give wrong sums."""
        return None if len(ranks) == 1 else self.groups[ranks]

    def axes(self, layout: Layout) -> Axes:
        """This rank's communicators under a layout."""
        if layout.id not in self._axes:
            mesh = self.meshes[layout.mesh]
            names: tuple[AxisName, ...] = ("dp", "tp", "pp", "cp", "mesh", "ep", "expert_dp")
            self._axes[layout.id] = Axes(**{name: self._axis(layout, mesh, name) for name in names})
        return self._axes[layout.id]

    def _axis(self, layout: Layout, mesh: Mesh, axis: AxisName) -> Axis:
        ranks = next(ranks for ranks in axis_ranks(layout, mesh, axis) if self.rank in ranks)
        return Axis(ranks, ranks.index(self.rank), self._of(ranks))

    def dp(self, spread: Spread) -> int:
        """How many dp ranks divide the rows of a spread."""
        return self.layouts[spread.layout].dp if spread.layout else 1


def join(plan: Plan, rank: int, device: torch.device, timeout: timedelta | None = None) -> World:
    """Create the plan's groups; a set of ranks that occurs twice gets one group. timeout: of each group, since groups
    do not inherit that of the world."""
    meshes = {m.id: m for m in plan.meshes}
    layouts = {x.id: x for x in plan.layouts}
    groups: dict[tuple[int, ...], Any] = {}
    # NCCL makes a group by a split of the world in which every rank takes part, members or not: one for each set would
    # be thousands of collectives. `split_group` sorts, and torch calls it experimental, so smaller worlds do without
    splits = device.type == "cuda" and plan.header.world > SPLIT_ABOVE
    sets: tuple[tuple[int, ...], ...]
    for group in plan.groups:
        if group.axis == "mesh":
            sets = (meshes[group.mesh or layouts[group.layout].mesh].members(),)
        else:
            layout = layouts[group.layout]
            sets = axis_ranks(layout, meshes[layout.mesh], group.axis)
        new = [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1 and ranks not in groups]
        in_order = all(list(ranks) == sorted(ranks) for ranks in new)  # otherwise of a mesh with another order
        if splits and in_order and len(new) > 1:
            groups |= dict.fromkeys(new, dist.split_group(split_ranks=list(map(list, new)), timeout=timeout))
            continue
        for ranks in new:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout, **_order(ranks))
    log_group = _log_group(plan, meshes, device, timeout)
    everything = [(range(plan.header.world), dist.group.WORLD), *groups.items()]
    shared = share_memory(everything, timeout) if device.type == "cpu" else ()
    return World(rank, device, meshes, layouts, groups, log_group, shared)


def _order(ranks: tuple[int, ...]) -> dict[str, Any]:
    """How `new_group` keeps the order of ranks, which it sorts by default. RL0710: this torch always does."""
    if list(ranks) == sorted(ranks):
        return {}
    if "sort_ranks" not in signature(dist.new_group).parameters:
        raise fail("RL0710", f"a mesh has the ranks {ranks_text(ranks)} in this order, which needs torch 2.12",
                   notes=(f"torch {torch.__version__} sorts the ranks of a group",),
                   help="update torch, or compile for meshes whose ranks are in ascending order")
    return {"sort_ranks": False}


def _log_group(plan: Plan, meshes: Mapping[str, Mesh], device: torch.device, timeout: timedelta | None) -> Any:
    """Metrics travel between hosts: a message of NCCL that waits for its peer would hold up every later one."""
    ranks = sorted({r for e, _ in event_paths(plan) if e.logged for r in meshes[e.mesh].members()})
    if device.type == "cpu" or len(ranks) < 2:
        return None
    return dist.new_group(ranks, timeout=timeout, backend="gloo")
