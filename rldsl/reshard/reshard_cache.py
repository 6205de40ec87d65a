"""What many ranks of a resharding have in common, computed once.

In: a `ReshardPlan`. Out: a `ReshardCache`: what each device of a node receives down each tree, what cells send to the
first node of a tree, and copies inside a node. `transfer_slices.py` makes the slices of one rank from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from rldsl.reshard.arrivals import IntraNodeCopy
from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.broadcast_trees import TREES
from rldsl.reshard.load_balance import Share
from rldsl.reshard.records import ReshardPlan, TransferSlice, TreeSupply
from rldsl.sharding.boxes import Cell


class SourceSlice(NamedTuple):
    """An interval of a box class that a cell sends to one device of the first node of a tree."""

    offset: int  # in everything that the cell sends to that tree
    box_class: int  # number in `ReshardPlan.classes`
    start: int  # first element of the class
    stop: int  # one more than the last


TransferSlices = tuple[TransferSlice, ...]
ClassSlice = tuple[int, int, int]  # (box class, start, stop)
# By (which of the two trees over the same nodes, device of the node), in the order of their offsets.
SourceSlices = Mapping[tuple[int, int], Sequence[SourceSlice]]
# What a cell sends to one device of the first node of a tree: with the cell, and what it sends to the whole tree.
SuppliedSlices = tuple[Cell, TreeSupply, Sequence[SourceSlice]]
# By (sender, receiver), devices of a node; with the tree down which it came: the copy is then made in the step after.
# None: the node holds it.
CopiesByPair = Mapping[tuple[int, int], Sequence[tuple[int | None, IntraNodeCopy]]]


class ReshardCache:
    """What is the same for many ranks of a plan, computed once: every method is cached."""

    def __init__(self, plan: ReshardPlan):
        self.plan = plan
        self.sent_by: dict[Cell, list[ClassSlice]] = defaultdict(list)
        for box_class, parts in plan.sent_parts.items():
            for who, start, stop in parts:
                self.sent_by[plan.classes[box_class].holders[who]].append((box_class, start, stop))
        self.groups_of_node: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (group, position in it)
        for group_index, group in enumerate(plan.groups):
            for at, node in enumerate(group.nodes):
                self.groups_of_node[node].append((group_index, at))
        # results of `sent_to_tree` by several, cell and which parts of its classes the devices receive
        self.known_parts: dict[tuple[bool, Cell, tuple[Sequence[Share], ...]], SourceSlices] = {}
        self.by_rank: dict[int, tuple[TransferSlices, TransferSlices]] = {}  # see `rank_slices`
        self.known_arrivals: dict[int, Mapping[int, Sequence[Share]]] = {}  # results of `all_parts`
        self.ranks: dict[tuple[Cell, int], int] = {}  # (cell, replica) -> rank
        self.alike = _Alike(plan.classes)
        self.supply_at, self.all_parts = cache(self._supply_at), cache(self._all_parts)
        self.local_copies, self.received = cache(self._local_copies), cache(self._received)
        self.sent_to_tree, self.sent_to_root = cache(self._sent_to_tree), cache(self._sent_to_root)

    def _local_copies(self, group_index: int, several: bool) -> CopiesByPair:
        """The copies inside a node of group `group_index`. several: whether its trees have more than one node."""
        found = defaultdict[tuple[int, int], list[tuple[int | None, IntraNodeCopy]]](list)
        group = self.plan.groups[group_index]
        for copy in group.local_copies:
            found[copy.src, copy.dst].append((None, copy))
        lists, places = group.arrivals.wanted.lists, group.arrivals.wanted.places
        for tree in TREES if several else TREES[:1]:
            for device, slices in self.received(group_index, tree, several).items():
                for box_class, start, stop in slices:
                    needers = lists[places[box_class][0]].needers
                    for needer in needers if len(needers) > 1 else ():
                        if needer != device:
                            found[device, needer].append(
                                (tree, IntraNodeCopy(1, box_class, device, needer, start, stop)))
        return found

    def _received(self, group_index: int, tree: int, several: bool) -> Mapping[int, Sequence[ClassSlice]]:
        """What each device of a node receives down a tree."""
        by_device = defaultdict[int, list[ClassSlice]](list)
        for box_class, parts in self.all_parts(group_index).items():
            for device, start, stop in parts:
                start, stop = tree_half(tree, start, stop, several)
                if start < stop:
                    by_device[device].append((box_class, start, stop))
        return by_device

    def _all_parts(self, group_index: int) -> Mapping[int, Sequence[Share]]:
        """Which device of a node of group `group_index` receives which part of each class that arrives, ascending."""
        found = sorted(self.plan.groups[group_index].arrivals.all_parts().items())
        self.known_arrivals[group_index] = dict(found)
        return self.known_arrivals[group_index]

    def _sent_to_tree(self, group_index: int, several: bool, cell: Cell) -> SourceSlices:
        """What a cell sends to one tree of group `group_index`, device after device, so that each device hears from few
        ranks. several: whether the tree has more than one node."""
        sent, known = self.sent_by.get(cell, ()), self.known_arrivals.get(group_index)
        arrivals = self.plan.groups[group_index].arrivals
        parts = tuple([arrivals.parts(box_class) if known is None else known.get(box_class, ())
                       for box_class, _, _ in sent])
        # most groups divide the classes of a cell in the same way
        if (found := self.known_parts.get(key := (several, cell, parts))) is None:
            found = self.known_parts[key] = _source_slices(several, sent, parts)
        return found

    def _sent_to_root(self, group_index: int, several: bool, tree: int, device: int) -> Sequence[SuppliedSlices]:
        """What cells send to a device of the first node of a tree of group `group_index`."""
        cells = {self.plan.classes[i].holders[who] for i, _, _ in self.received(group_index, tree, several)[device]
                 for who, _, _ in self.plan.sent_parts[i]}
        found = (self.sent_from_cell(group_index, several, tree, device, cell) for cell in sorted(cells))
        return [x for x in found if x is not None]

    def sent_from_cell(self, group_index: int, several: bool, tree: int, device: int,
                       cell: Cell) -> SuppliedSlices | None:
        """What one cell sends to a device of the first node of a tree; None if it sends nothing to the group."""
        if (supply := self.supply_at(cell, group_index)) is None:
            return None
        return cell, supply, self.sent_to_tree(group_index, several, cell).get((tree, device), ())

    def _supply_at(self, cell: Cell, group_index: int) -> TreeSupply | None:
        """What a cell sends to the trees of a group; None: nothing."""
        source = self.plan.senders.get(cell)
        return source.supplies.at(group_index) if source is not None else None

    def rank(self, cell: Cell, replica: int) -> int:
        """The rank that is replica `replica` of a cell of the source."""
        if (key := (cell, replica)) not in self.ranks:
            self.ranks[key] = self.plan.src.rank(cell, replica)
        return self.ranks[key]


class _Alike(dict[int, int]):
    """Of each box class a number: equal for classes that have boxes of the same parameters and shapes, in the same
    order, as those of different zero shards have. Found for the classes that are asked for: a few rounds are estimated,
    in which few classes travel."""

    def __init__(self, classes: Sequence[BoxClass]):
        super().__init__()
        self.classes = classes
        self.numbers: dict[tuple[tuple[object, ...], ...], int] = {}  # by the boxes without their places

    def __missing__(self, box_class: int) -> int:
        key = tuple([(spec, len(layers), *[stop - start for start, stop in box])
                     for spec, layers, box, _ in self.classes[box_class].segments])
        self[box_class] = self.numbers.setdefault(key, len(self.numbers))
        return self[box_class]


@lru_cache(maxsize=8)
def reshard_cache(plan: ReshardPlan) -> ReshardCache:
    """One cache for everyone in a process who asks for many ranks of a plan."""
    return ReshardCache(plan)


def tree_half(tree: int, start: int, stop: int, trees: bool) -> tuple[int, int]:
    """The half of [start, stop) that goes down a tree. Everything goes down tree 0 where no node forwards."""
    middle = (start + stop) // 2 if trees else stop
    return (middle, stop) if tree else (start, middle)


def _source_slices(several: bool, sent: Sequence[ClassSlice], parts: Sequence[Sequence[Share]]) -> SourceSlices:
    """What a cell that sends `sent` sends to a tree. several: whether the tree has more than one node. parts: of each
    class, what the devices of a node receive of it."""
    cuts = []
    for (box_class, low, high), of_devices in zip(sent, parts, strict=True):
        for device, first, past in of_devices:
            for tree in TREES if several else TREES[:1]:
                start, stop = tree_half(tree, first, past, True) if several else (first, past)
                if start < low:
                    start = low
                if stop > high:
                    stop = high
                if start < stop:
                    cuts.append((tree, device, box_class, start, stop))
    cuts.sort()
    slices, offset = dict[tuple[int, int], list[SourceSlice]](), 0
    for tree, device, box_class, start, stop in cuts:
        slices.setdefault((tree, device), []).append(SourceSlice(offset, box_class, start, stop))
        offset += stop - start
    return slices
