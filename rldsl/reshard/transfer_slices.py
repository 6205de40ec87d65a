"""Transfer slices: what one rank sends and receives in a resharding.

In: a `ReshardPlan` and a rank. Out: the rank's `TransferSlice`s. No other rank's are computed, so the work does not
grow with the number of ranks. Invariant: a slice is in the list of its receiver if and only if it is in the list of its
sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rldsl.reshard.arrivals import IntraNodeCopy
from rldsl.reshard.broadcast_trees import TREES, children, depth, parent, root
from rldsl.reshard.records import CellSender, NodeGroup, ReshardPlan, TransferSlice, TreeSupply
from rldsl.reshard.reshard_cache import ReshardCache, SourceSlice, SuppliedSlices, TransferSlices


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


def _down_tree(shared: ReshardCache, group_index: int, tree: int, device: int, step: int,
               peer: int) -> list[TransferSlice]:
    """What travels down a tree of several nodes to devices with this number. peer: at the other end."""
    return [TransferSlice(step, peer, box_class, start, stop)
            for box_class, start, stop in shared.received(group_index, tree, True).get(device, ())]


def _forwarded(plan: ReshardPlan, group_index: int, at: int, device: int, shared: ReshardCache,
               only: int | None = None) -> Iterator[TransferSlice]:
    """What a device forwards to the same device of its child nodes. only: to this rank."""
    group = plan.groups[group_index]
    _, first, count = tree_position(group, at)
    for tree in TREES if count > 1 else ():
        for child in children(count, tree, at - first):
            peer = group.nodes[first + child] * plan.devices + device
            if only in (None, peer):
                yield from _down_tree(shared, group_index, tree, device, depth(count, tree, child), peer)


def _from_network(plan: ReshardPlan, group_index: int, at: int, device: int, shared: ReshardCache,
                  only: int | None = None) -> Iterator[TransferSlice]:
    """What a device receives over the network. only: from this rank, or another holder at its cell."""
    group = plan.groups[group_index]
    i, first, count = tree_position(group, at)
    for tree in TREES[: 2 if count > 1 else 1]:
        above = parent(count, tree, at - first)
        if above is None:
            yield from _from_sources(plan, group_index, i, tree, device, shared, only)
            continue
        peer = group.nodes[first + above] * plan.devices + device
        if only in (None, peer):
            yield from _down_tree(shared, group_index, tree, device, depth(count, tree, at - first), peer)


# ---------------------------------------------------------------------------------------------------- sources
#
# What a cell sends is one sequence of elements, of which each sender has an interval (`CellSender`). Both ends of a
# message find it on their own: a sender looks for the slices in its interval, a receiver for the senders in whose
# intervals its slices lie. For example, of 12 elements for three trees with 4 each, the first of two senders has
# [0, 6): all that the first tree gets, and the first half of what the second one gets.


def _interval(source: CellSender, sender_index: int) -> tuple[int, int]:
    """Which elements of a cell's sequence this sender sends: [start, stop)."""
    return (source.size * sender_index // source.num_senders,
            source.size * (sender_index + 1) // source.num_senders)


def _sender_of(source: CellSender, element: int) -> int:
    """In whose interval an element of a cell's sequence lies: the inverse of `_interval`."""
    return ((element + 1) * source.num_senders - 1) // source.size


def _in_interval(part: SourceSlice, begin: int, low: int, high: int, peer: int) -> Iterator[TransferSlice]:
    """What of a slice lies in [low, high) of a cell's sequence, if anything. begin: where the slice begins there. peer:
    the rank at the other end."""
    _, box_class, part_start, part_stop = part
    start, stop = max(low, begin), min(high, begin + part_stop - part_start)
    if start < stop:
        yield TransferSlice(0, peer, box_class, part_start + start - begin, part_start + stop - begin)


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
    low, high = _interval(source, sender_index)
    for supply, i in _trees_supplied(source, low, high, only):
        group = plan.groups[supply.group]
        first, past = group.tree_nodes(i)
        tree_begin = supply.start + i * supply.amount  # in the sequence
        slices = shared.sent_to_tree(supply.group, past - first > 1, cell)
        for (tree, device), parts in slices.items():
            peer = group.nodes[first + root(past - first, tree)] * plan.devices + device
            for part in parts:
                yield from _in_interval(part, tree_begin + part.offset, low, high, peer)


def _trees_supplied(source: CellSender, low: int, high: int,
                    only: tuple[int, int] | None) -> Iterator[tuple[TreeSupply, int]]:
    """(supply, number of the tree) for the trees that get elements in [low, high) of a cell's sequence. only: this tree
    of this node group."""
    if only is None:
        for supply in source.supplies:
            yield from ((supply, i) for i in _trees_between(supply, low, high))
        return
    group_index, tree = only
    found = source.supplies.at(group_index)
    if found is not None and tree in _trees_between(found, low, high):
        yield found, tree


def _trees_between(supply: TreeSupply, low: int, high: int) -> range:
    """The trees of a group that get elements in [low, high) of a cell's sequence."""
    return range(max(low - supply.start, 0) // supply.amount,
                 min(supply.trees, -(-max(high - supply.start, 0) // supply.amount)))


def _from_sources(plan: ReshardPlan, group_index: int, i: int, tree: int, device: int, shared: ReshardCache,
                  only: int | None) -> Iterator[TransferSlice]:
    """What the first node of tree `i` of a group receives from the holders. only: see `_from_network`."""
    first, past = plan.groups[group_index].tree_nodes(i)
    for cell, supply, parts in _suppliers(plan, (group_index, past - first > 1, tree, device), shared, only):
        source = plan.senders[cell]
        if source.num_senders == 1:  # the usual case, in which nothing is cut
            peer = shared.rank(cell, 0)
            yield from [TransferSlice(0, peer, box_class, start, stop) for _, box_class, start, stop in parts]
            continue
        tree_begin = supply.start + i * supply.amount  # in the sequence
        for part in parts:
            begin = tree_begin + part.offset
            end = begin + part.stop - part.start
            for sender_index in range(_sender_of(source, begin), _sender_of(source, end - 1) + 1):
                peer = shared.rank(cell, sender_index * plan.src.replicas // source.num_senders)
                yield from _in_interval(part, begin, *_interval(source, sender_index), peer)


def _suppliers(plan: ReshardPlan, where: tuple[int, bool, int, int], shared: ReshardCache,
               only: int | None) -> Sequence[SuppliedSlices]:
    """What the cells send to one device of the first node of a tree. where: as the arguments of
    `ReshardCache.sent_to_root`. only: see `_from_network`."""
    if only is None:
        return shared.sent_to_root(*where)
    cell = plan.src.cell(only)
    sent = shared.sent_from_cell(*where, cell) if cell is not None else None
    return [] if sent is None else [sent]


def _sender_index(senders: int, replicas: int, replica: int) -> int | None:
    """Which of the sending ranks of a cell a replica is; None if it does not send. The senders are spread evenly over
    the replicas, so that they are on different nodes if the replicas are. Sender i is replica i * replicas // senders;
    this is the inverse."""
    sender_index = -(-replica * senders // replicas)
    return sender_index if sender_index < senders and sender_index * replicas // senders == replica else None
