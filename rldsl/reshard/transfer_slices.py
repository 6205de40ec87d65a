"""Transfer slices: what one rank sends and receives in a resharding.

In: `Routes` and a rank. Out: the rank's `TransferSlice`s. No other rank's are computed, so the work does not grow with
the number of ranks. Invariant: a slice is in the list of its receiver if and only if it is in the list of its sender.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from rldsl.reshard.broadcast_trees import TREES, children, depth, parent, root
from rldsl.reshard.records import IntraNodeCopy, NodeGroup, Routes, TreeSupply
from rldsl.sharding.boxes import Cell


class TransferSlice(NamedTuple):
    """An interval of a shard class that goes to or comes from a peer."""

    step: int  # of every bucket
    peer: int  # rank
    shard_class: int  # number in `Routes.classes`
    start: int  # first element of the class
    stop: int  # past the last


class SourceSlice(NamedTuple):
    """An interval of a shard class that a cell sends to one device of the first node of a tree."""

    offset: int  # in everything that the cell sends to that tree
    tree: int  # 0 or 1: which of the two trees over the same nodes
    device: int  # of the node
    shard_class: int  # number in `Routes.classes`
    start: int
    stop: int


TransferSlices = tuple[TransferSlice, ...]
ClassSlice = tuple[int, int, int]  # (shard class, start, stop)
CopiesByDevice = Mapping[int, Sequence[IntraNodeCopy]]


def rank_slices(p: Routes, rank: int, known: RouteCache | None = None) -> tuple[TransferSlices, TransferSlices]:
    """(sends, receives) of a rank, sorted. known: a cache of these routes, for callers that ask for many ranks."""
    node, device = divmod(rank, p.devices)
    known = known or RouteCache(p)
    sends, receives = list(_sent_as_holder(p, rank, known)), []
    for q, at in known.groups_of_node.get(node, ()):
        group = p.groups[q]
        first, (out, into) = node * p.devices, known.local_copies(q, *_steps(group, at))
        sends += [TransferSlice(c.step, first + c.dst, c.shard_class, c.start, c.stop) for c in out.get(device, ())]
        receives += [TransferSlice(c.step, first + c.src, c.shard_class, c.start, c.stop)
                     for c in into.get(device, ())]
        sends += _forwarded(p, q, at, device, known)
        receives += _from_network(p, q, at, device, known)
    return tuple(sorted(sends)), tuple(sorted(receives))


class RouteCache:
    """What many ranks share, computed once: every method is cached."""

    def __init__(self, p: Routes):
        self.p = p
        self.sent_by: dict[Cell, list[ClassSlice]] = defaultdict(list)
        for shard_class, shares in p.shares.items():
            for who, start, stop in shares:
                self.sent_by[p.classes[shard_class].holders[who]].append((shard_class, start, stop))
        self.groups_of_node: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (group, position in it)
        for q, group in enumerate(p.groups):
            for at, node in enumerate(group.nodes):
                self.groups_of_node[node].append((q, at))
        self.local_copies, self.received = cache(self._local_copies), cache(self._received)
        self.sent_to_tree, self.sent_to_roots = cache(self._sent_to_tree), cache(self._sent_to_roots)

    def _local_copies(self, q: int, *steps: int) -> tuple[CopiesByDevice, CopiesByDevice]:
        """The copies inside a node of group `q`, by sender and by receiver. steps: per tree, the step in which the node
        receives; its devices exchange what arrived in the next step."""
        out, into = defaultdict[int, list[IntraNodeCopy]](list), defaultdict[int, list[IntraNodeCopy]](list)
        group = self.p.groups[q]
        given = (IntraNodeCopy(step + 1, shard_class, device, needer, start, stop) for tree, step in enumerate(steps)
                 for device, found in self.received(q, tree, len(steps) > 1).items()
                 for shard_class, start, stop in found
                 for needer in group.arrivals[shard_class].needers if needer != device)
        for copy in (*group.local_copies, *given):
            out[copy.src].append(copy)
            into[copy.dst].append(copy)
        return out, into

    def _received(self, q: int, tree: int, several: bool) -> Mapping[int, Sequence[ClassSlice]]:
        """What each device of a node receives down a tree."""
        found = defaultdict[int, list[ClassSlice]](list)
        for shard_class, arrival in self.p.groups[q].arrivals.items():
            for device, start, stop in arrival.shares:
                start, stop = tree_half(tree, start, stop, several)
                if start < stop:
                    found[device].append((shard_class, start, stop))
        return found

    def _sent_to_tree(self, q: int, several: bool, cell: Cell) -> Sequence[SourceSlice]:
        """What a cell sends to one tree of group `q`, device after device, so that each device hears from few ranks.
        several: whether the tree has more than one node."""
        arrivals, cuts = self.p.groups[q].arrivals, []
        for shard_class, low, high in self.sent_by.get(cell, ()):
            for device, first, past in arrivals[shard_class].shares if shard_class in arrivals else ():
                for tree in TREES[: 2 if several else 1]:
                    start, stop = tree_half(tree, first, past, several)
                    if max(start, low) < min(stop, high):
                        cuts.append((tree, device, shard_class, max(start, low), min(stop, high)))
        found, at = [], 0
        for tree, device, shard_class, start, stop in sorted(cuts):
            found.append(SourceSlice(at, tree, device, shard_class, start, stop))
            at += stop - start
        return found

    def _sent_to_roots(self, q: int,
                       several: bool) -> Mapping[tuple[int, int], Sequence[tuple[Cell, TreeSupply, SourceSlice]]]:
        """What cells send to the first nodes of the trees of group `q`, by tree and device."""
        found = defaultdict[tuple[int, int], list[tuple[Cell, TreeSupply, SourceSlice]]](list)
        for cell, source in self.p.senders.items():
            at = bisect_left(source.supplies, q, key=lambda s: s.group)
            if at < len(source.supplies) and source.supplies[at].group == q:
                for part in self.sent_to_tree(q, several, cell):
                    found[part.tree, part.device].append((cell, source.supplies[at], part))
        return found


def tree_half(tree: int, start: int, stop: int, trees: bool) -> tuple[int, int]:
    """The half of [start, stop) that goes down a tree. Everything goes down tree 0 where no node forwards."""
    middle = (start + stop) // 2 if trees else stop
    return (middle, stop) if tree else (start, middle)


def tree_position(group: NodeGroup, at: int) -> tuple[int, int, int]:
    """(number of the tree, its first node, its number of nodes) for the node at position `at` of a group."""
    i = at * group.num_trees // len(group.nodes)
    start, stop = group.tree_nodes(i)
    return i, start, stop - start


def _steps(group: NodeGroup, at: int) -> tuple[int, ...]:
    """In which step of a bucket the node at position `at` of a group receives, per tree."""
    _, first, count = tree_position(group, at)
    return tuple(depth(count, tree, at - first) for tree in TREES[: 2 if count > 1 else 1])


def _forwarded(p: Routes, q: int, at: int, device: int, known: RouteCache) -> Iterator[TransferSlice]:
    """What a device forwards to the same device of its child nodes."""
    group = p.groups[q]
    _, first, count = tree_position(group, at)
    for tree in TREES if count > 1 else ():
        for child in children(count, tree, at - first):
            step, peer = depth(count, tree, child), group.nodes[first + child] * p.devices + device
            for shard_class, start, stop in known.received(q, tree, True).get(device, ()):
                yield TransferSlice(step, peer, shard_class, start, stop)


def _from_network(p: Routes, q: int, at: int, device: int, known: RouteCache) -> Iterator[TransferSlice]:
    """What a device receives over the network."""
    group = p.groups[q]
    i, first, count = tree_position(group, at)
    for tree in TREES[: 2 if count > 1 else 1]:
        above = parent(count, tree, at - first)
        if above is not None:
            step, peer = depth(count, tree, at - first), group.nodes[first + above] * p.devices + device
            for shard_class, start, stop in known.received(q, tree, True).get(device, ()):
                yield TransferSlice(step, peer, shard_class, start, stop)
        else:
            yield from _from_sources(p, q, i, tree, device, known)


# ---------------------------------------------------------------------------------------------------- sources


def _sent_as_holder(p: Routes, rank: int, known: RouteCache) -> Iterator[TransferSlice]:
    """What a rank sends as a holder of shard classes."""
    cell = p.src.cell(rank)
    source = p.senders.get(cell) if cell is not None else None
    if cell is None or source is None:
        return
    window = _window(source.num_senders, p.src.replicas, p.src.replica(rank))
    if window is None:
        return
    low, high = (source.size * x // source.num_senders for x in (window, window + 1))
    for q, trees, amount, at in source.supplies:
        for i in range(max(low - at, 0) // amount, min(trees, -(-max(high - at, 0) // amount))):
            group = p.groups[q]
            first, past = group.tree_nodes(i)
            for part in known.sent_to_tree(q, past - first > 1, cell):
                begin = at + i * amount + part.offset
                start, stop = max(low, begin), min(high, begin + part.stop - part.start)
                if start < stop:
                    node = group.nodes[first + root(past - first, part.tree)]
                    yield TransferSlice(0, node * p.devices + part.device, part.shard_class, part.start + start - begin,
                               part.start + stop - begin)


def _from_sources(p: Routes, q: int, i: int, tree: int, device: int, known: RouteCache) -> Iterator[TransferSlice]:
    """What the first node of tree `i` of a group receives from the holders."""
    first, past = p.groups[q].tree_nodes(i)
    for cell, supply, part in known.sent_to_roots(q, past - first > 1).get((tree, device), ()):
        source = p.senders[cell]
        start = begin = supply.start + i * supply.amount + part.offset
        end = begin + part.stop - part.start
        while start < end:
            window = ((start + 1) * source.num_senders - 1) // source.size
            stop = min(end, source.size * (window + 1) // source.num_senders)
            peer = p.src.rank(cell, window * p.src.replicas // source.num_senders)
            yield TransferSlice(0, peer, part.shard_class, part.start + start - begin, part.start + stop - begin)
            start = stop


def _window(senders: int, replicas: int, replica: int) -> int | None:
    """Which of the sending ranks of a cell a replica is; None if it does not send. The senders are spread evenly over
    the replicas, so that they lie on different nodes where replicas do."""
    window = -(-replica * senders // replicas)
    return window if window < senders and window * replicas // senders == replica else None
