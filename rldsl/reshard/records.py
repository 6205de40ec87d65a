"""Who sends which part of every box class to whom: one record per node group and per cell.

Records that `planning.py` makes and `transfer_slices.py` reads. Every machine computes the same ones. Their size
depends on degrees and groups of parameters, not on the number of layers; what node groups have in common is one record
for all of them, so the size grows with cells plus groups, and not with their product.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from rldsl.reshard.arrivals import Arrivals, IntraNodeCopy
from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.load_balance import Share
from rldsl.reshard.node_groups import CellPairs, MeshView
from rldsl.sharding.boxes import Cell


class TreeSupply(NamedTuple):
    """What the ranks at a cell send to the trees of one node group."""

    group: int  # number of the group in `ReshardPlan.groups`
    trees: int  # how many trees the group has
    amount: int  # elements per tree
    start: int  # where the first tree's elements begin in everything that the cell sends


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes whose devices hold and want the same cells, so that one record says what each of them does."""

    nodes: tuple[int, ...]  # ascending
    cells: CellPairs  # of each device of such a node
    arrivals: Arrivals  # by number of the box class: those that no device of the node holds
    local_copies: tuple[IntraNodeCopy, ...]  # of box classes that some device of the node holds
    num_trees: int  # broadcast trees over the nodes; as many as nodes where no node passes anything on

    def tree_nodes(self, i: int) -> tuple[int, int]:
        """The nodes [start, stop) of tree `i`, as positions in `nodes`."""
        return -(-i * len(self.nodes) // self.num_trees), -(-(i + 1) * len(self.nodes) // self.num_trees)


@dataclass(frozen=True, slots=True)
class FamilyTrees:
    """The node groups that want the same (a family), and their broadcast trees. One object for all senders."""

    groups: tuple[int, ...]  # numbers in `ReshardPlan.groups`, ascending
    trees: tuple[int, ...]  # of each group
    ends: tuple[int, ...] = field(init=False, repr=False)  # 0, and the running totals of the trees

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(accumulate(self.trees, initial=0)))


class FewerElements(NamedTuple):
    """A group that needs less from a cell than the other groups of its family, since its nodes hold some of it."""

    group: int  # number in `ReshardPlan.groups`
    trees: int  # of the group
    amount: int  # elements less, per tree


@dataclass(frozen=True, slots=True)
class Supplies:
    """What a cell sends to each tree of each node group, group after group."""

    families: tuple[tuple[FamilyTrees, int], ...]  # and the elements that each of their trees gets
    fewer: tuple[FewerElements, ...]  # ascending by group

    def __iter__(self) -> Iterator[TreeSupply]:
        less, start = {e.group: e.amount for e in self.fewer}, 0
        for group, trees, amount in sorted((group, trees, amount) for family, amount in self.families
                                           for group, trees in zip(family.groups, family.trees, strict=True)):
            if amount := amount - less.get(group, 0):
                yield TreeSupply(group, trees, amount, start)
                start += trees * amount

    def at(self, group: int) -> TreeSupply | None:
        """None if the cell sends nothing to the group."""
        trees = own = start = 0
        for family, amount in self.families:
            position = bisect_left(family.groups, group)
            start += amount * family.ends[position]
            if position < len(family.groups) and family.groups[position] == group:
                trees, own = family.trees[position], amount
        for e in self.fewer:
            if e.group == group:
                own -= e.amount
            if e.group >= group:
                break
            start -= e.trees * e.amount
        return TreeSupply(group, trees, own, start) if own else None


@dataclass(frozen=True, slots=True)
class CellSender:
    """Everything that the ranks at one cell send over the network, as one sequence of elements: group after group, and
    tree after tree inside a group. Each of `num_senders` ranks sends an equal interval of that sequence."""

    size: int  # elements
    num_senders: int  # ranks
    supplies: Supplies  # by group


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """How the parameters of a model get from one layout to another, for all ranks. `runtime/comm/reshard.py` derives
    what one rank does. Compared by identity, so that what follows from a plan can be cached."""

    devices: int  # per node
    src: MeshView  # the source layout on its ranks
    dst: MeshView  # the destination layout on its ranks
    classes: tuple[BoxClass, ...]  # boxes that move together
    groups: tuple[NodeGroup, ...]  # nodes that receive the same
    sent_parts: Mapping[int, tuple[Share, ...]]  # class that crosses the network -> what each holder cell sends
    senders: Mapping[Cell, CellSender]  # cell of the source layout -> what it sends
    busiest: int = 0  # the most elements that one rank sends or receives; a bound where it also sends for others


class TransferSlice(NamedTuple):
    """An interval of a box class that goes to or comes from a peer."""

    step: int  # of every bucket
    peer: int  # rank
    box_class: int  # number in `ReshardPlan.classes`
    start: int  # first element of the class
    stop: int  # past the last
