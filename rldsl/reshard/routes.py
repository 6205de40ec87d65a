"""Which paths lines take.

In: a model, two layouts on their meshes, the number of devices of a node. Out: `Paths`. What one rank does by them is
in `transfer_slices.py`.

Rules. A rank that holds a line under the source layout gets none of it. In a node with holders of a line, they send to
those that lack it. Into any other node the line comes once, in even parts for the ranks that lack it, and each of these
then gives its part to the others. Senders are balanced: over the network, and inside nodes. Where the holders would
still send more than the busiest rank has to receive, nodes of a kind pass lines on to each other in trees
(`broadcast_trees.py`), so that each line leaves its holders a few times only; where they would inside a node, a line is
handed out in parts there too. """

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.intra_node import Wants, arriving, kind_of
from rldsl.reshard.load_balance import Share, balance, cut
from rldsl.reshard.node_groups import Places, Side, kinds
from rldsl.reshard.records import Paths, Source, Supply, handed, taken
from rldsl.reshard.shard_classes import Line, lines
from rldsl.sharding.boxes import Cell

WORTH = 1.125  # passing on costs rounds: it must make the busiest rank less busy by this factor


def paths(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh, devices_per_node: int) -> Paths:
    """How `model` gets from layout `src` to layout `dst`."""
    here, there = Side.of(src, src_mesh), Side.of(dst, dst_mesh)
    every = lines(model, src, dst)
    sizes, order, have, want = [line.size for line in every], _together(every), _by_have(every), _by_want(every)
    alike = (kind_of(sizes, nodes, places, _wants(places, have, want, order))
             for places, nodes in kinds(here, there, devices_per_node).items())
    found = _network(Paths(devices_per_node, here, there, every, tuple(alike), {}, {}))
    return replace(found, busiest=_busiest(found))


def _by_have(every: Sequence[Line]) -> Mapping[Cell, Sequence[int]]:
    found: dict[Cell, list[int]] = defaultdict(list)
    for i, line in enumerate(every):
        for cell in line.have:
            found[cell].append(i)
    return found


def _by_want(every: Sequence[Line]) -> Mapping[tuple[Cell, ...], Sequence[int]]:
    found: dict[tuple[Cell, ...], list[int]] = defaultdict(list)
    for i, line in enumerate(every):
        found[line.want].append(i)
    return found


def _together(every: Sequence[Line]) -> Sequence[int]:
    """The place of each line when those with the same holders come together, so that a device hears from few; of a
    shard of the rows, all of them hold what is not divided otherwise."""
    shards = [[(c.stage, c.shard, c.part) for c in line.have] for line in every]
    order = sorted(range(len(every)), key=lambda i: (shards[i], i))
    return [at for _, at in sorted(zip(order, range(len(every))))]


def _wants(places: Places, have: Mapping[Cell, Sequence[int]], want: Mapping[tuple[Cell, ...], Sequence[int]],
           order: Sequence[int]) -> Wants:
    there, held = defaultdict[Cell, list[int]](list), defaultdict[int, list[int]](list)
    for device, (mine, cell) in enumerate(places):
        if cell is not None:
            there[cell].append(device)
        for i in have.get(mine, ()) if mine is not None else ():
            held[i].append(device)
    away, inside = defaultdict[tuple[int, ...], list[int]](list), {}
    for cells, found in want.items():
        devices = tuple(sorted(d for cell in cells for d in there.get(cell, ())))
        if devices:
            away[devices] += [i for i in found if i not in held]
            for i in (i for i in found if i in held):
                if lack := tuple(d for d in devices if d not in held[i]):
                    inside[i] = tuple(held[i]), lack
    return Wants({devices: sorted(found, key=order.__getitem__) for devices, found in away.items() if found},
                 dict(sorted(inside.items())))


# --------------------------------------------------------------------------------------------- over the network


def _network(p: Paths) -> Paths:
    """Choose how often lines leave their holders, and which of the holders send them: as many trees as there can be
    without a holder that sends much more than the busiest rank receives."""
    least = max((x for kind in p.kinds for x in arriving(kind).values()), default=0)
    if not least:
        return p
    most = max(len(k.nodes) for k in p.kinds)
    direct, single = _supplied(p, 1, least), _supplied(p, most, least)
    if _sending(direct) <= max(least, _sending(single)) * WORTH:
        return direct
    fold = 2
    while fold < most:
        way = _supplied(p, fold, least)
        if _sending(way) <= max(least, _sending(single)) * WORTH:
            return way
        fold *= 2
    return single


def _sending(p: Paths) -> int:
    """What the busiest rank sends over the network; those who pass lines on may be holders of others."""
    own = {cell: -(-s.size // s.senders) for cell, s in p.sources.items()}
    passed = (x + own.get(kind.places[device][0], 0) for kind in p.kinds if kind.trees < len(kind.nodes)
              for device, x in arriving(kind).items())
    return max((*own.values(), *passed))


def _supplied(p: Paths, fold: int, least: int) -> Paths:
    """With trees of `fold` nodes. least: what the busiest rank receives, and so what one rank may send."""
    trees = [-(-len(k.nodes) // fold) if k.entering else len(k.nodes) for k in p.kinds]
    copies: Counter[int] = Counter()
    for kind, count in zip(p.kinds, trees):
        for i in kind.entering:
            copies[i] += count
    alike: dict[tuple[Cell, ...], list[tuple[int, int]]] = defaultdict(list)
    for i, count in sorted(copies.items()):
        alike[p.lines[i].have].append((i, p.lines[i].size * count))
    shares: dict[int, list[Share]] = {i: [] for i in copies}
    for have, amounts in balance({have: sum(n for _, n in found) for have, found in alike.items()}, {}).items():
        for i, (who, start, stop) in cut(alike[have], amounts):
            start, stop = start // copies[i], stop // copies[i]
            if start < stop:
                shares[i].append(Share(who, start, stop))
    given = {i: [(p.lines[i].have[who], stop - start) for who, start, stop in found] for i, found in shares.items()}
    amount: dict[Cell, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for q, kind in enumerate(p.kinds):
        for i in kind.entering:
            for cell, size in given[i]:
                amount[cell][q] += size
    totals = {cell: sum(trees[q] * x for q, x in by.items()) for cell, by in amount.items()}
    level = max(least, *(-(-x // p.src.copies) for x in totals.values()))
    sources = {}
    for cell in sorted(amount):
        at, supplies = 0, []
        for q, x in sorted(amount[cell].items()):
            supplies.append(Supply(q, trees[q], x, at))
            at += trees[q] * x
        sources[cell] = Source(at, min(p.src.copies, -(-at // level)), tuple(supplies))
    return replace(p, kinds=tuple(replace(k, trees=n) for k, n in zip(p.kinds, trees)),
                   shares={i: tuple(s) for i, s in shares.items()}, sources=sources)


def _busiest(p: Paths) -> int:
    """The most elements that one rank sends or receives (where it sends for others too, a bound of that)."""
    most = max((-(-s.size // s.senders) for s in p.sources.values()), default=0)
    for kind in p.kinds:
        came = taken(kind.entering.values())
        sent, received = handed(came), Counter[int]()
        for needers, parts in came.items():
            received.update(dict.fromkeys(needers, sum(parts.values())))
            if kind.trees < len(kind.nodes):
                sent.update(parts)
        for hop in kind.hops:
            sent[hop.src] += hop.stop - hop.start
            received[hop.dst] += (hop.stop - hop.start)
        for device, (cell, _) in enumerate(kind.places):
            source = p.sources.get(cell) if cell is not None else None
            if source is not None:
                sent[device] += -(-source.size // source.senders)
        most = max(most, *sent.values(), *received.values(), 0)
    return most
