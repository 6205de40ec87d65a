"""Lanes: what one rank sends and receives along the paths of a reallocation.

In: `Paths` and a rank. Out: its `Lane`s; those of any other rank are not looked at, so the work does not grow with the
number of ranks. Invariant: a lane stands in the list of its receiver if and only if it stands in that of its sender.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from rldsl.plan.boxes import Cell
from rldsl.plan.realloc.records import Hop, Kind, Paths, fan
from rldsl.plan.realloc.trees import TREES, children, depth, parent, root


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


Known = dict[tuple[int, bool, Cell], tuple[Part, ...]]  # kind, whether its trees pass anything on, cell


def rank_lanes(p: Paths, rank: int, known: Known | None = None) -> tuple[tuple[Lane, ...], tuple[Lane, ...]]:
    """(sends, receives), sorted. known: kept from rank to rank of the same paths by who asks for many."""
    node, device = divmod(rank, p.devices)
    known = {} if known is None else known
    sends, receives = list(_supplied(p, rank, known)), []
    for q, kind in enumerate(p.kinds):
        at = bisect_right(kind.nodes, node) - 1
        if at >= 0 and kind.nodes[at] == node:
            for hop in _inside(kind, at):
                if hop.src == device:
                    sends.append(Lane(hop.step, node * p.devices + hop.dst, hop.line, hop.start, hop.stop))
                elif hop.dst == device:
                    receives.append(Lane(hop.step, node * p.devices + hop.src, hop.line, hop.start, hop.stop))
            sends += _passed_on(p, kind, at, device)
            receives += _entering(p, q, at, device, known)
    return tuple(sorted(sends)), tuple(sorted(receives))


def half(tree: int, start: int, stop: int, trees: bool) -> tuple[int, int]:
    """The part of [start, stop) that goes down a tree; all goes down the first where nodes pass nothing on."""
    middle = (start + stop) // 2 if trees else stop
    return (middle, stop) if tree else (start, middle)


def place(kind: Kind, at: int) -> tuple[int, int, int]:
    """(tree, first node, nodes) of the pair of trees in which node number `at` of a kind is."""
    i = at * kind.trees // len(kind.nodes)
    start, stop = kind.tree(i)
    return i, start, stop - start


def _inside(kind: Kind, at: int) -> Iterator[Hop]:
    """Hops of the node; what came over the network in some step is given to the others in the next."""
    yield from kind.hops
    _, first, count = place(kind, at)
    for i, entering in kind.entering.items():
        for tree in TREES[: 2 if count > 1 else 1]:
            step = depth(count, tree, at - first) + 1
            for hop in fan(i, entering, step):
                start, stop = half(tree, hop.start, hop.stop, count > 1)
                if start < stop:
                    yield hop._replace(start=start, stop=stop)


def _passed_on(p: Paths, kind: Kind, at: int, device: int) -> Iterator[Lane]:
    """What the device sends to the same device of the nodes below its own."""
    _, first, count = place(kind, at)
    for tree in TREES if count > 1 else ():
        for child in children(count, tree, at - first):
            step, peer = depth(count, tree, child), kind.nodes[first + child] * p.devices + device
            for i, start, stop in _own(kind, device, tree, True):
                yield Lane(step, peer, i, start, stop)


def _entering(p: Paths, q: int, at: int, device: int, known: Known) -> Iterator[Lane]:
    """What comes to the device over the network."""
    kind = p.kinds[q]
    i, first, count = place(kind, at)
    for tree in TREES[: 2 if count > 1 else 1]:
        above = parent(count, tree, at - first)
        if above is not None:
            step, peer = depth(count, tree, at - first), kind.nodes[first + above] * p.devices + device
            for line, start, stop in _own(kind, device, tree, True):
                yield Lane(step, peer, line, start, stop)
        else:
            yield from _from_sources(p, q, i, tree, device, known)


def _own(kind: Kind, device: int, tree: int, trees: bool) -> Iterator[tuple[int, int, int]]:
    """(line, start, stop) that come to the device down a tree."""
    for i, entering in kind.entering.items():
        for who, start, stop in entering.shares:
            if who == device:
                start, stop = half(tree, start, stop, trees)
                if start < stop:
                    yield i, start, stop


# ---------------------------------------------------------------------------------------------------- sources


def parts(p: Paths, q: int, i: int, cell: Cell, known: Known) -> tuple[Part, ...]:
    """What `cell` sends to tree number `i` of a kind, in the order of its line: device after device, so that each
    hears from few. The same for all trees of several nodes, and for all of one."""
    start, stop = p.kinds[q].tree(i)
    key = (q, stop - start > 1, cell)
    if key not in known:
        known[key] = _parts(p, *key)
    return known[key]


def _parts(p: Paths, q: int, several: bool, cell: Cell) -> tuple[Part, ...]:
    kind, found, at = p.kinds[q], [], 0
    trees = TREES[: 2 if several else 1]
    cuts: list[tuple[int, int, int, int, int]] = []
    for line, entering in kind.entering.items():
        for who, low, high in p.shares[line]:
            if p.lines[line].have[who] == cell:
                for device, *ends in entering.shares:
                    for tree in trees:
                        a, b = half(tree, *ends, len(trees) > 1)
                        if max(a, low) < min(b, high):
                            cuts.append((tree, device, line, max(a, low), min(b, high)))
    for tree, device, line, start, stop in sorted(cuts):
        found.append(Part(at, tree, device, line, start, stop))
        at += stop - start
    return tuple(found)


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
            for part in parts(p, q, i, cell, known):
                begin = at + i * amount + part.at
                start, stop = max(low, begin), min(high, begin + part.stop - part.start)
                if start < stop:
                    node = kind.nodes[first + root(past - first, part.tree)]
                    yield Lane(0, node * p.devices + part.device, part.line, part.start + start - begin,
                               part.start + stop - begin)


def _from_sources(p: Paths, q: int, i: int, tree: int, device: int, known: Known) -> Iterator[Lane]:
    """What the first node of tree number `i` of a kind gets from the holders."""
    cells = {p.lines[line].have[share.who] for line in p.kinds[q].entering for share in p.shares[line]}
    for cell in sorted(cells):
        source = p.sources[cell]
        supply = next(s for s in source.supplies if s.kind == q)
        for part in parts(p, q, i, cell, known):
            if (part.tree, part.device) != (tree, device):
                continue
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
