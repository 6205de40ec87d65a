"""Transfer slices: what one rank sends and receives in a resharding.

In: a `ReshardPlan` and a rank. Out: the rank's `TransferSlice`s. No other rank's are computed, so the work does not
grow with the number of ranks. Invariant: a slice is in the list of its receiver if and only if it is in the list of its
sender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from rldsl.reshard.arrivals import IntraNodeCopy
from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.broadcast_trees import TREES, children, depth, parent, root
from rldsl.reshard.load_balance import Share
from rldsl.reshard.records import NodeGroup, ReshardPlan, TreeSupply
from rldsl.sharding.boxes import Cell


class TransferSlice(NamedTuple):
    """An interval of a box class that goes to or comes from a peer."""

    step: int  # of every bucket
    peer: int  # rank
    box_class: int  # number in `ReshardPlan.classes`
    start: int  # first element of the class
    stop: int  # past the last


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


def rank_slices(plan: ReshardPlan, rank: int,
                shared: ReshardCache | None = None) -> tuple[TransferSlices, TransferSlices]:
    """(sends, receives) of a rank, sorted. shared: the cache of this plan, for callers that ask for many ranks."""
    if shared is None:
        return _rank_slices(plan, rank, ReshardCache(plan))
    if rank not in shared.by_rank:
        shared.by_rank[rank] = _rank_slices(plan, rank, shared)
    return shared.by_rank[rank]


def _rank_slices(plan: ReshardPlan, rank: int, shared: ReshardCache) -> tuple[TransferSlices, TransferSlices]:
    node, device = divmod(rank, plan.devices)
    sends, receives = [*_sent_as_holder(plan, rank, shared)], list[TransferSlice]()
    for group_index, at in shared.groups_of_node.get(node, ()):
        group = plan.groups[group_index]
        first, steps = node * plan.devices, _steps(group, at)
        copies = shared.local_copies(group_index, len(steps) > 1)
        for other in range(plan.devices):
            sends += _copied(copies.get((device, other), ()), first + other, steps)
            receives += _copied(copies.get((other, device), ()), first + other, steps)
        sends += _forwarded(plan, group_index, at, device, shared)
        receives += _from_network(plan, group_index, at, device, shared)
    return tuple(sorted(sends)), tuple(sorted(receives))


def pair_slices(plan: ReshardPlan, sender: int, receiver: int,
                shared: ReshardCache) -> tuple[TransferSlices, TransferSlices]:
    """What `sender` lists for `receiver`, and what `receiver` lists from `sender`: the same as in `rank_slices` of
    either, each side found by its own rule, and nothing else of these ranks."""
    (node, device), first = divmod(receiver, plan.devices), sender // plan.devices * plan.devices
    sends, receives = list[TransferSlice](), list[TransferSlice]()
    if receiver // plan.devices == sender // plan.devices:
        for group_index, at in shared.groups_of_node.get(node, ()):
            steps = _steps(plan.groups[group_index], at)
            copies = shared.local_copies(group_index, len(steps) > 1).get((sender - first, device), ())
            sends += _copied(copies, receiver, steps)
            receives += _copied(copies, sender, steps)
    for group_index, at in shared.groups_of_node.get(sender // plan.devices, ()):
        sends += _forwarded(plan, group_index, at, sender - first, shared, receiver)
    for group_index, at in shared.groups_of_node.get(node, ()):
        tree = tree_position(plan.groups[group_index], at)[0]
        sends += [x for x in _sent_as_holder(plan, sender, shared, (group_index, tree)) if x.peer == receiver]
        receives += [x for x in _from_network(plan, group_index, at, device, shared, sender) if x.peer == sender]
    return tuple(sorted(sends)), tuple(sorted(receives))


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


def tree_position(group: NodeGroup, at: int) -> tuple[int, int, int]:
    """(number of the tree, its first node, its number of nodes) for the node at position `at` of a group."""
    i = at * group.num_trees // len(group.nodes)
    start, stop = group.tree_nodes(i)
    return i, start, stop - start


def _copied(copies: Iterable[tuple[int | None, IntraNodeCopy]], peer: int, steps: Sequence[int]) -> list[TransferSlice]:
    """Copies to or from a device of the same node. steps: in which the node receives, per tree; what arrived down a
    tree is copied in the step after."""
    return [TransferSlice(step if tree is None else steps[tree] + 1, peer, box_class, start, stop)
            for tree, (step, box_class, _, _, start, stop) in copies]


def _steps(group: NodeGroup, at: int) -> tuple[int, ...]:
    """In which step of a bucket the node at position `at` of a group receives, per tree."""
    _, first, count = tree_position(group, at)
    return tuple(depth(count, tree, at - first) for tree in TREES[: 2 if count > 1 else 1])


def _forwarded(plan: ReshardPlan, group_index: int, at: int, device: int, shared: ReshardCache,
               only: int | None = None) -> Iterator[TransferSlice]:
    """What a device forwards to the same device of its child nodes. only: to this rank."""
    group = plan.groups[group_index]
    _, first, count = tree_position(group, at)
    for tree in TREES if count > 1 else ():
        for child in children(count, tree, at - first):
            peer = group.nodes[first + child] * plan.devices + device
            if only not in (None, peer):
                continue
            step = depth(count, tree, child)
            yield from [TransferSlice(step, peer, box_class, start, stop)
                        for box_class, start, stop in shared.received(group_index, tree, True).get(device, ())]


def _from_network(plan: ReshardPlan, group_index: int, at: int, device: int, shared: ReshardCache,
                  only: int | None = None) -> Iterator[TransferSlice]:
    """What a device receives over the network. only: from this rank, or another holder at its cell."""
    group = plan.groups[group_index]
    i, first, count = tree_position(group, at)
    for tree in TREES[: 2 if count > 1 else 1]:
        above = parent(count, tree, at - first)
        if above is not None:
            if only not in (None, group.nodes[first + above] * plan.devices + device):
                continue
            step, peer = depth(count, tree, at - first), group.nodes[first + above] * plan.devices + device
            yield from [TransferSlice(step, peer, box_class, start, stop)
                        for box_class, start, stop in shared.received(group_index, tree, True).get(device, ())]
        else:
            yield from _from_sources(plan, group_index, i, tree, device, shared, only)


# ---------------------------------------------------------------------------------------------------- sources


def _sent_as_holder(plan: ReshardPlan, rank: int, shared: ReshardCache,
                    only: tuple[int, int] | None = None) -> Iterator[TransferSlice]:
    """What a rank sends as a holder of box classes. only: to one tree of one node group."""
    cell = plan.src.cell(rank)
    source = plan.senders.get(cell) if cell is not None else None
    if cell is None or source is None:
        return
    sender_index = _sender_index(source.num_senders, plan.src.replicas, plan.src.replica(rank))
    if sender_index is None:
        return
    low, high = (source.size * x // source.num_senders for x in (sender_index, sender_index + 1))
    supplies = source.supplies if only is None else (x for x in (source.supplies.at(only[0]),) if x is not None)
    for group_index, trees, amount, at in supplies:
        served = range(max(low - at, 0) // amount, min(trees, -(-max(high - at, 0) // amount)))
        for i in served if only is None else (only[1],) if only[1] in served else ():
            group = plan.groups[group_index]
            first, past = group.tree_nodes(i)
            for (tree, device), parts in shared.sent_to_tree(group_index, past - first > 1, cell).items():
                peer = group.nodes[first + root(past - first, tree)] * plan.devices + device
                for offset, box_class, part_start, part_stop in parts:
                    begin = at + i * amount + offset
                    start, stop = max(low, begin), min(high, begin + part_stop - part_start)
                    if start < stop:
                        yield TransferSlice(0, peer, box_class, part_start + start - begin, part_start + stop - begin)


def _from_sources(plan: ReshardPlan, group_index: int, i: int, tree: int, device: int, shared: ReshardCache,
                  only: int | None) -> Iterator[TransferSlice]:
    """What the first node of tree `i` of a group receives from the holders. only: see `_from_network`."""
    first, past = plan.groups[group_index].tree_nodes(i)
    where = group_index, past - first > 1, tree, device
    if only is None:
        supplied = shared.sent_to_root(*where)
    else:
        cell_of_sender = plan.src.cell(only)
        sent = shared.sent_from_cell(*where, cell_of_sender) if cell_of_sender is not None else None
        supplied = [sent] if sent is not None else []
    for cell, supply, parts in supplied:
        source = plan.senders[cell]
        if source.num_senders == 1:
            peer = shared.rank(cell, 0)
            yield from [TransferSlice(0, peer, box_class, start, stop) for _, box_class, start, stop in parts]
            continue
        for part in parts:
            start = begin = supply.start + i * supply.amount + part.offset
            end = begin + part.stop - part.start
            while start < end:
                sender_index = ((start + 1) * source.num_senders - 1) // source.size
                stop = min(end, source.size * (sender_index + 1) // source.num_senders)
                peer = shared.rank(cell, sender_index * plan.src.replicas // source.num_senders)
                yield TransferSlice(0, peer, part.box_class, part.start + start - begin, part.start + stop - begin)
                start = stop


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


def _sender_index(senders: int, replicas: int, replica: int) -> int | None:
    """Which of the sending ranks of a cell a replica is; None if it does not send. The senders are spread evenly over
    the replicas, so that they are on different nodes if the replicas are. Sender i is replica i * replicas // senders;
    this is the inverse."""
    sender_index = -(-replica * senders // replicas)
    return sender_index if sender_index < senders and sender_index * replicas // senders == replica else None
