"""Lanes: what one rank sends and receives along the paths of a reallocation.

In: `Paths` and a rank. Out: its `Lane`s; those of any other rank are not looked at, so the work does not grow with the
number of ranks. Invariant: a lane stands in the list of its receiver if and only if it stands in that of its sender.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from rldsl.reshard.broadcast_trees import TREES, children, depth, parent, root
from rldsl.reshard.records import Hop, Kind, Paths, Supply
from rldsl.sharding.boxes import Cell


class Lane(NamedTuple):
    """[start, stop) of a line goes to or comes from `peer`, in step `step` of every bucket."""

    step: int
    peer: int
    line: int
    start: int
    stop: int


class Part(NamedTuple):
    """What a cell sends to one device of a tree's first node: [start, stop) of a line, at `at` of the cell's part for
    that tree."""

    at: int
    tree: int
    device: int
    line: int
    start: int
    stop: int


Lanes = tuple[Lane, ...]
Ends = tuple[int, int, int]  # a line, and from where to where of it


def rank_lanes(p: Paths, rank: int, known: Known | None = None) -> tuple[Lanes, Lanes]:
    """(sends, receives), sorted. known: of these paths, from who asks for many ranks."""
    node, device = divmod(rank, p.devices)
    known = known or Known(p)
    sends, receives = list(_supplied(p, rank, known)), []
    for q, kind in enumerate(p.kinds):
        at = bisect_right(kind.nodes, node) - 1
        if at >= 0 and kind.nodes[at] == node:
            first, (out, into) = node * p.devices, known.inside(q, *_steps(kind, at))
            sends += [Lane(hop.step, first + hop.dst, hop.line, hop.start, hop.stop) for hop in out.get(device, ())]
            receives += [Lane(hop.step, first + hop.src, hop.line, hop.start, hop.stop) for hop in into.get(device, ())]
            sends += _passed_on(p, q, at, device, known)
            receives += _entering(p, q, at, device, known)
    return tuple(sorted(sends)), tuple(sorted(receives))


class Known:
    """What ranks have in common: each method's answers are kept."""

    def __init__(self, p: Paths):
        self.p = p
        self.lines: dict[Cell, list[Ends]] = defaultdict(list)  # what each cell sends of each line
        for line, shares in p.shares.items():
            for who, start, stop in shares:
                self.lines[p.lines[line].have[who]].append((line, start, stop))
        self.inside, self.own = cache(self._inside), cache(self._own)
        self.parts, self.into = cache(self._parts), cache(self._into)

    def _inside(self, q: int, *steps: int) -> tuple[Mapping[int, Sequence[Hop]], Mapping[int, Sequence[Hop]]]:
        """Hops of a node of a kind by sender, and by receiver. What comes over the network, down each of its trees in
        one of `steps`, is given to the others in the next."""
        out, into = defaultdict[int, list[Hop]](list), defaultdict[int, list[Hop]](list)
        kind = self.p.kinds[q]
        given = (Hop(step + 1, line, device, needer, start, stop) for tree, step in enumerate(steps)
                 for device, found in self.own(q, tree, len(steps) > 1).items() for line, start, stop in found
                 for needer in kind.entering[line].needers if needer != device)
        for hop in (*kind.hops, *given):
            out[hop.src].append(hop)
            into[hop.dst].append(hop)
        return out, into

    def _own(self, q: int, tree: int, several: bool) -> Mapping[int, Sequence[Ends]]:
        """What comes down a tree to each device of a node."""
        found = defaultdict[int, list[Ends]](list)
        for line, entering in self.p.kinds[q].entering.items():
            for device, start, stop in entering.shares:
                start, stop = half(tree, start, stop, several)
                if start < stop:
                    found[device].append((line, start, stop))
        return found

    def _parts(self, q: int, several: bool, cell: Cell) -> Sequence[Part]:
        """What a cell sends to a tree of a kind (of several nodes or of one), in the order of its line: device after
        device, so that each hears from few."""
        entering, cuts = self.p.kinds[q].entering, []
        for line, low, high in self.lines.get(cell, ()):
            for device, *ends in entering[line].shares if line in entering else ():
                for tree in TREES[: 2 if several else 1]:
                    start, stop = half(tree, *ends, several)
                    if max(start, low) < min(stop, high):
                        cuts.append((tree, device, line, max(start, low), min(stop, high)))
        found, at = [], 0
        for tree, device, line, start, stop in sorted(cuts):
            found.append(Part(at, tree, device, line, start, stop))
            at += stop - start
        return found

    def _into(self, q: int, several: bool) -> Mapping[tuple[int, int], Sequence[tuple[Cell, Supply, Part]]]:
        """What holders send to the first nodes of trees of a kind: by tree and device."""
        found = defaultdict[tuple[int, int], list[tuple[Cell, Supply, Part]]](list)
        for cell, source in self.p.sources.items():
            at = bisect_left(source.supplies, q, key=lambda s: s.kind)
            if at < len(source.supplies) and source.supplies[at].kind == q:
                for part in self.parts(q, several, cell):
                    found[part.tree, part.device].append((cell, source.supplies[at], part))
        return found


def half(tree: int, start: int, stop: int, trees: bool) -> tuple[int, int]:
    """The part of [start, stop) that goes down a tree; all goes down the first where nodes pass nothing on."""
    middle = (start + stop) // 2 if trees else stop
    return (middle, stop) if tree else (start, middle)


def place(kind: Kind, at: int) -> tuple[int, int, int]:
    """(tree, first node, nodes) of the pair of trees in which node number `at` of a kind is."""
    i = at * kind.trees // len(kind.nodes)
    start, stop = kind.tree(i)
    return i, start, stop - start


def _steps(kind: Kind, at: int) -> tuple[int, ...]:
    """In which step of a bucket node number `at` of a kind is reached, down each of its trees."""
    _, first, count = place(kind, at)
    return tuple(depth(count, tree, at - first) for tree in TREES[: 2 if count > 1 else 1])


def _passed_on(p: Paths, q: int, at: int, device: int, known: Known) -> Iterator[Lane]:
    """What the device sends to the same device of the nodes below its own."""
    kind = p.kinds[q]
    _, first, count = place(kind, at)
    for tree in TREES if count > 1 else ():
        for child in children(count, tree, at - first):
            step, peer = depth(count, tree, child), kind.nodes[first + child] * p.devices + device
            for line, start, stop in known.own(q, tree, True).get(device, ()):
                yield Lane(step, peer, line, start, stop)


def _entering(p: Paths, q: int, at: int, device: int, known: Known) -> Iterator[Lane]:
    """What comes to the device over the network."""
    kind = p.kinds[q]
    i, first, count = place(kind, at)
    for tree in TREES[: 2 if count > 1 else 1]:
        above = parent(count, tree, at - first)
        if above is not None:
            step, peer = depth(count, tree, at - first), kind.nodes[first + above] * p.devices + device
            for line, start, stop in known.own(q, tree, True).get(device, ()):
                yield Lane(step, peer, line, start, stop)
        else:
            yield from _from_sources(p, q, i, tree, device, known)


# ---------------------------------------------------------------------------------------------------- sources


def _supplied(p: Paths, rank: int, known: Known) -> Iterator[Lane]:
    """What the rank sends as a holder."""
    cell = p.src.cell(rank)
    source = p.sources.get(cell) if cell is not None else None
    if cell is None or source is None:
        return
    window = _window(source.senders, p.src.copies, p.src.copy(rank))
    if window is None:
        return
    low, high = (source.size * x // source.senders for x in (window, window + 1))
    for q, copies, amount, at in source.supplies:
        for i in range(max(low - at, 0) // amount, min(copies, -(-max(high - at, 0) // amount))):
            kind = p.kinds[q]
            first, past = kind.tree(i)
            for part in known.parts(q, past - first > 1, cell):
                begin = at + i * amount + part.at
                start, stop = max(low, begin), min(high, begin + part.stop - part.start)
                if start < stop:
                    node = kind.nodes[first + root(past - first, part.tree)]
                    yield Lane(0, node * p.devices + part.device, part.line, part.start + start - begin,
                               part.start + stop - begin)


def _from_sources(p: Paths, q: int, i: int, tree: int, device: int, known: Known) -> Iterator[Lane]:
    """What the first node of tree number `i` of a kind gets from the holders."""
    first, past = p.kinds[q].tree(i)
    for cell, supply, part in known.into(q, past - first > 1).get((tree, device), ()):
        source = p.sources[cell]
        start = begin = supply.start + i * supply.amount + part.at
        end = begin + part.stop - part.start
        while start < end:
            window = ((start + 1) * source.senders - 1) // source.size
            stop = min(end, source.size * (window + 1) // source.senders)
            peer = p.src.rank(cell, window * p.src.copies // source.senders)
            yield Lane(0, peer, part.line, part.start + start - begin, part.start + stop - begin)
            start = stop


def _window(senders: int, copies: int, copy: int) -> int | None:
    """Which of the sending ranks of a cell the rank number `copy` is: they are spread evenly."""
    window = -(-copy * senders // copies)
    return window if window < senders and window * copies // senders == copy else None
