"""Who sends which part of every box class to whom: one record per node group and per cell.

Records that `planning.py` makes and `transfer_slices.py` reads. Every machine computes the same ones. Their size
depends on degrees and groups of parameters, not on the number of ranks or layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.load_balance import Share
from rldsl.reshard.node_groups import CellPairs, MeshView
from rldsl.sharding.boxes import Cell


class IntraNodeCopy(NamedTuple):
    """One device of a node sends a slice of a box class to another device of the same node."""

    step: int  # 0; 1 where the sender itself received the slice in step 0
    box_class: int  # number of the class in `ReshardPlan.classes`
    src: int  # device of the node
    dst: int  # device of the node
    start: int  # first element of the class
    stop: int  # past the last


class TreeSupply(NamedTuple):
    """What the ranks at a cell send to the trees of one node group."""

    group: int  # number of the group in `ReshardPlan.groups`
    trees: int  # how many trees the group has
    amount: int  # elements per tree
    start: int  # where the first tree's elements begin in everything that the cell sends


@dataclass(frozen=True, slots=True)
class Arrival:
    """A box class that enters a node over the network."""

    needers: tuple[int, ...]  # all devices of the node that lack it
    received_parts: tuple[Share, ...]  # which device receives which part from outside; it then sends it to the others


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes whose devices hold and want the same cells, so that one record says what each of them does."""

    nodes: tuple[int, ...]  # ascending
    cells: CellPairs  # of each device of such a node
    arrivals: Mapping[int, Arrival]  # by number of the box class: those that no device of the node holds
    local_copies: tuple[IntraNodeCopy, ...]  # of box classes that some device of the node holds
    num_trees: int  # broadcast trees over the nodes; as many as nodes where no node passes anything on

    def tree_nodes(self, i: int) -> tuple[int, int]:
        """The nodes [start, stop) of tree `i`, as positions in `nodes`."""
        return -(-i * len(self.nodes) // self.num_trees), -(-(i + 1) * len(self.nodes) // self.num_trees)


@dataclass(frozen=True, slots=True)
class CellSender:
    """Everything that the ranks at one cell send over the network, as one sequence of elements: group after group, and
    tree after tree inside a group. Each of `num_senders` ranks sends an equal interval of that sequence."""

    size: int  # elements
    num_senders: int  # ranks
    supplies: tuple[TreeSupply, ...]  # by group


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """How the parameters of a model get from one layout to another, for all ranks. `runtime/comm/reshard.py` derives
    what one rank does."""

    devices: int  # per node
    src: MeshView
    dst: MeshView
    classes: tuple[BoxClass, ...]
    groups: tuple[NodeGroup, ...]
    sent_parts: Mapping[int, tuple[Share, ...]]  # class that crosses the network -> what each holder cell sends
    senders: Mapping[Cell, CellSender]
    busiest: int = 0  # the most elements that one rank sends or receives; a bound where it also sends for others


def arrivals_by_device(arrivals: Iterable[Arrival]) -> dict[tuple[int, ...], Counter[int]]:
    """Elements that each device of a node receives over the network, summed over the classes that the same devices
    lack: devices that lack them -> device -> elements."""
    received: dict[tuple[int, ...], Counter[int]] = {}
    for arrival in arrivals:
        by_device = received.setdefault(arrival.needers, Counter())
        for device, start, stop in arrival.received_parts:
            by_device[device] += stop - start
    return received


def forwarded_by_device(arrived: Mapping[tuple[int, ...], Mapping[int, int]]) -> Counter[int]:
    """Elements that each device then sends to the other devices of its node. arrived: see `arrivals_by_device`."""
    forwarded = Counter[int]()
    for needers, parts in arrived.items():
        for device, size in parts.items():
            forwarded[device] += size * (len(needers) - (device in needers))
    return forwarded


def fan_out(box_class: int, arrival: Arrival, step: int) -> Iterator[IntraNodeCopy]:
    """The copies from the devices that received a class to all others of the node that lack it."""
    for device, start, stop in arrival.received_parts:
        for needer in arrival.needers:
            if needer != device:
                yield IntraNodeCopy(step, box_class, device, needer, start, stop)
