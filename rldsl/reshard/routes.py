"""Which routes shard classes take between two layouts.

In: a model, two layouts on their meshes, the number of devices per node. Out: `Routes`. What one rank then does is in
`transfer_slices.py`.

Rules. A rank that holds a class under the source layout receives none of it. In a node where some device holds the
class, these devices send it to those that lack it. Into any other node the class enters once, in even parts for the
devices that lack it, and each of these then sends its part to the others. Senders are balanced, over the network and
inside nodes. Where the holders would still send more than the busiest rank has to receive, the nodes of a group forward
classes to each other along broadcast trees (`broadcast_trees.py`), so that a class leaves its holders only a few times;
where that happens inside a node, a class is distributed in parts there, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh, Model
from rldsl.plan.notation import degrees_text
from rldsl.reshard.intra_node import Needs, elements_arriving, node_group
from rldsl.reshard.load_balance import Share, balance, cut_at
from rldsl.reshard.node_groups import CellPairs, MeshView, node_groups
from rldsl.reshard.records import CellSender, Routes, TreeSupply, arrivals_by_device, forwarded_by_device
from rldsl.reshard.shard_classes import ShardClass, shard_classes
from rldsl.sharding.boxes import Cell

MIN_GAIN = 1.125  # forwarding along trees costs rounds: it must lighten the busiest rank by this factor


def plan_routes(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                devices_per_node: int) -> Routes:
    """How `model` gets from layout `src` to layout `dst`, on meshes of the given devices per node. Worked out once for
    all who ask: passes, the memory estimate, the proof, and each rank of a run."""
    bare = Model("", "causal_lm", "", "float32", model.params, model.layers, "")  # no more of a model matters
    return _plan_routes(bare, *_nameless(src, src_mesh), *_nameless(dst, dst_mesh), devices_per_node)


def _nameless(layout: Layout, mesh: Mesh) -> tuple[Layout, Mesh]:
    """The same without names and backend, which no route depends on. Errors: AssertionError if the layout is on another
    mesh."""
    assert layout.mesh == mesh.id, f"layout {layout.id} is on mesh {layout.mesh}, not {mesh.id}"
    degrees = degrees_text(layout.dp, layout.tp, layout.pp, layout.cp, layout.zero, layout.ep, layout.vpp)
    return replace(layout, id=degrees, mesh="", backend=DEFAULT_BACKEND), replace(mesh, id="")


@lru_cache(maxsize=64)
def _plan_routes(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                 devices_per_node: int) -> Routes:
    here, there = MeshView.of(src, src_mesh), MeshView.of(dst, dst_mesh)
    every = shard_classes(model, src, dst)
    sizes, order, have, want = [line.size for line in every], _together(every), _by_have(every), _by_want(every)
    alike = (node_group(sizes, nodes, places, _needs(places, have, want, order))
             for places, nodes in node_groups(here, there, devices_per_node).items())
    found = _network(Routes(devices_per_node, here, there, every, tuple(alike), {}, {}))
    return replace(found, busiest=_busiest(found))


def _by_have(every: Sequence[ShardClass]) -> Mapping[Cell, Sequence[int]]:
    found: dict[Cell, list[int]] = defaultdict(list)
    for i, line in enumerate(every):
        for cell in line.holders:
            found[cell].append(i)
    return found


def _by_want(every: Sequence[ShardClass]) -> Mapping[tuple[Cell, ...], Sequence[int]]:
    found: dict[tuple[Cell, ...], list[int]] = defaultdict(list)
    for i, line in enumerate(every):
        found[line.needers].append(i)
    return found


def _together(every: Sequence[ShardClass]) -> Sequence[int]:
    """The position of each class when classes with the same holders are adjacent, so that a device hears from few
    peers. Compared by shard first: all shards of the rows hold what is not divided otherwise."""
    shards = [[(c.stage, c.shard, c.part) for c in line.holders] for line in every]
    order = sorted(range(len(every)), key=lambda i: (shards[i], i))
    return [at for _, at in sorted(zip(order, range(len(every)), strict=True))]


def _needs(places: CellPairs, have: Mapping[Cell, Sequence[int]], want: Mapping[tuple[Cell, ...], Sequence[int]],
           order: Sequence[int]) -> Needs:
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
    return Needs({devices: sorted(found, key=order.__getitem__) for devices, found in away.items() if found},
                 dict(sorted(inside.items())))


# --------------------------------------------------------------------------------------------- over the network


def _network(p: Routes) -> Routes:
    """Choose how often classes leave their holders, and which holders send them: as many trees as possible (fewer
    hops) without a holder that sends much more than the busiest rank receives."""
    # What the busiest receiver gets cannot be avoided, so senders below that are not the bottleneck. `direct` (trees of
    # one node: holders serve every node themselves) has the fewest rounds and wins if it is within MIN_GAIN of the
    # best; otherwise trees are made longer by doubling until the holders are light enough.
    least = max((x for group in p.groups for x in elements_arriving(group).values()), default=0)
    if not least:
        return p
    most = max(len(k.nodes) for k in p.groups)
    direct, single = _supplied(p, 1, least), _supplied(p, most, least)
    if _sending(direct) <= max(least, _sending(single)) * MIN_GAIN:
        return direct
    fold = 2
    while fold < most:
        way = _supplied(p, fold, least)
        if _sending(way) <= max(least, _sending(single)) * MIN_GAIN:
            return way
        fold *= 2
    return single


def _sending(p: Routes) -> int:
    """What the busiest rank sends over the network; a rank that forwards may also hold other classes."""
    own = {cell: -(-s.size // s.num_senders) for cell, s in p.senders.items()}
    most = max(own.values())
    for group in p.groups:
        if group.num_trees < len(group.nodes):
            for device, size in elements_arriving(group).items():
                cell = group.cells[device][0]
                most = max(most, size + (own.get(cell, 0) if cell is not None else 0))
    return most


def _supplied(p: Routes, fold: int, least: int) -> Routes:
    """The routes with trees of `fold` nodes each. least: what the busiest rank receives, and so what one rank may send
    without becoming the bottleneck."""
    trees = [-(-len(k.nodes) // fold) if k.arrivals else len(k.nodes) for k in p.groups]
    copies: Counter[int] = Counter()
    for group, count in zip(p.groups, trees, strict=True):
        for i in group.arrivals:
            copies[i] += count
    alike: dict[tuple[Cell, ...], list[tuple[int, int]]] = defaultdict(list)
    for i, count in sorted(copies.items()):
        alike[p.classes[i].holders].append((i, p.classes[i].size * count))
    shares: dict[int, list[Share]] = {i: [] for i in copies}
    for have, amounts in balance({have: sum(n for _, n in found) for have, found in alike.items()}, {}).items():
        for i, (who, start, stop) in cut_at(alike[have], amounts):
            start, stop = start // copies[i], stop // copies[i]
            if start < stop:
                shares[i].append(Share(who, start, stop))
    given = {i: [(p.classes[i].holders[who], stop - start) for who, start, stop in found]
             for i, found in shares.items()}
    amount: dict[Cell, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for q, group in enumerate(p.groups):
        for i in group.arrivals:
            for cell, size in given[i]:
                amount[cell][q] += size
    totals = {cell: sum(trees[q] * x for q, x in by.items()) for cell, by in amount.items()}
    level = max(least, *(-(-x // p.src.replicas) for x in totals.values()))
    sources = {}
    for cell in sorted(amount):
        at, supplies = 0, []
        for q, x in sorted(amount[cell].items()):
            supplies.append(TreeSupply(q, trees[q], x, at))
            at += trees[q] * x
        sources[cell] = CellSender(at, min(p.src.replicas, -(-at // level)), tuple(supplies))
    return replace(p, groups=tuple(replace(k, num_trees=n) for k, n in zip(p.groups, trees, strict=True)),
                   shares={i: tuple(s) for i, s in shares.items()}, senders=sources)


def _busiest(p: Routes) -> int:
    """The most elements that one rank sends or receives; an upper bound where it also forwards."""
    most = max((-(-s.size // s.num_senders) for s in p.senders.values()), default=0)
    for group in p.groups:
        came = arrivals_by_device(group.arrivals.values())
        sent, received = forwarded_by_device(came), Counter[int]()
        for needers, parts in came.items():
            received.update(dict.fromkeys(needers, sum(parts.values())))
            if group.num_trees < len(group.nodes):
                sent.update(parts)
        for copy in group.local_copies:
            sent[copy.src] += copy.stop - copy.start
            received[copy.dst] += (copy.stop - copy.start)
        for device, (cell, _) in enumerate(group.cells):
            source = p.senders.get(cell) if cell is not None else None
            if source is not None:
                sent[device] += -(-source.size // source.num_senders)
        most = max(most, *sent.values(), *received.values(), 0)
    return most
