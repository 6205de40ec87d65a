"""Planning a reshard: who sends which box class to whom.

In: a model, two layouts on their meshes, the number of devices per node. Out: a `ReshardPlan`. What one rank then does
is in `transfer_slices.py`.

Rules. A rank that holds a class under the source layout receives none of it. In a node where some device holds the
class, these devices send it to those that lack it. Into any other node the class enters once, in even parts for the
devices that lack it, and each of these then sends its part to the others. Senders are balanced, over the network and
inside nodes. Where the holders would still send more than the busiest rank has to receive, the nodes of a group forward
classes to each other along broadcast trees (`broadcast_trees.py`), so that a class leaves its holders only a few times;
if that happens inside a node, a class is distributed in parts there, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh, Model
from rldsl.plan.notation import degrees_text
from rldsl.reshard.box_classes import BoxClass, box_classes
from rldsl.reshard.intra_node import Needs, elements_arriving, node_group
from rldsl.reshard.load_balance import Share, balance, cut_at
from rldsl.reshard.node_groups import CellPairs, MeshView, node_groups
from rldsl.reshard.records import CellSender, ReshardPlan, TreeSupply, arrivals_by_device, forwarded_by_device
from rldsl.sharding.boxes import Cell

MIN_GAIN = 1.125  # forwarding along trees costs rounds: it must lighten the busiest rank by this factor


def plan_reshard(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                 devices_per_node: int) -> ReshardPlan:
    """How `model` gets from layout `src` to layout `dst`, on meshes of the given devices per node. Computed once for
    everyone who asks: passes, the memory estimate, the verifier, and each rank of a run."""
    bare = Model("", "causal_lm", "", "float32", model.params, model.layers, "")  # nothing else of a model matters
    return _plan_reshard(bare, *_nameless(src, src_mesh), *_nameless(dst, dst_mesh), devices_per_node)


def _nameless(layout: Layout, mesh: Mesh) -> tuple[Layout, Mesh]:
    """The same without names and backend, on which no reshard depends. Errors: AssertionError if the layout is on
    another mesh."""
    assert layout.mesh == mesh.id, f"layout {layout.id} is on mesh {layout.mesh}, not {mesh.id}"
    degrees = degrees_text(layout.dp, layout.tp, layout.pp, layout.cp, layout.zero, layout.ep, layout.vpp)
    return replace(layout, id=degrees, mesh="", backend=DEFAULT_BACKEND), replace(mesh, id="")


@lru_cache(maxsize=64)
def _plan_reshard(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                  devices_per_node: int) -> ReshardPlan:
    src_view, dst_view = MeshView.of(src, src_mesh), MeshView.of(dst, dst_mesh)
    classes = box_classes(model, src, dst)
    sizes, order = [c.size for c in classes], _adjacent_by_holders(classes)
    held_by, needed_by = _by_holder(classes), _by_needers(classes)
    groups = (node_group(sizes, nodes, cells, _needs(cells, held_by, needed_by, order))
              for cells, nodes in node_groups(src_view, dst_view, devices_per_node).items())
    plan = _choose_tree_size(ReshardPlan(devices_per_node, src_view, dst_view, classes, tuple(groups), {}, {}))
    return replace(plan, busiest=_busiest(plan))


def _by_holder(classes: Sequence[BoxClass]) -> Mapping[Cell, Sequence[int]]:
    """Source cell -> the numbers of the classes that it holds."""
    held: dict[Cell, list[int]] = defaultdict(list)
    for i, box_class in enumerate(classes):
        for cell in box_class.holders:
            held[cell].append(i)
    return held


def _by_needers(classes: Sequence[BoxClass]) -> Mapping[tuple[Cell, ...], Sequence[int]]:
    """Destination cells -> the numbers of the classes that exactly these cells need."""
    needed: dict[tuple[Cell, ...], list[int]] = defaultdict(list)
    for i, box_class in enumerate(classes):
        needed[box_class.needers].append(i)
    return needed


def _adjacent_by_holders(classes: Sequence[BoxClass]) -> Sequence[int]:
    """The position of each class when classes with the same holders are adjacent, so that a device hears from few
    peers. Compared by zero shard first: all zero shards hold what is not divided otherwise."""
    keys = [[(c.pp_rank, c.zero_shard, c.part) for c in box_class.holders] for box_class in classes]
    order = sorted(range(len(classes)), key=lambda i: (keys[i], i))
    return [position for _, position in sorted(zip(order, range(len(classes)), strict=True))]


def _needs(cells: CellPairs, held_by: Mapping[Cell, Sequence[int]], needed_by: Mapping[tuple[Cell, ...], Sequence[int]],
           order: Sequence[int]) -> Needs:
    """What the devices of a node lack. cells: of each device, under source and destination."""
    devices_at = defaultdict[Cell, list[int]](list)  # destination cell -> devices
    holders = defaultdict[int, list[int]](list)  # class -> devices that hold it
    for device, (src_cell, dst_cell) in enumerate(cells):
        if dst_cell is not None:
            devices_at[dst_cell].append(device)
        for i in held_by.get(src_cell, ()) if src_cell is not None else ():
            holders[i].append(device)
    remote = defaultdict[tuple[int, ...], list[int]](list)  # devices that lack them -> classes from other nodes
    local: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # class -> (devices that hold, that lack it)
    for needers, numbers in needed_by.items():
        devices = tuple(sorted(d for cell in needers for d in devices_at.get(cell, ())))
        if devices:
            remote[devices] += [i for i in numbers if i not in holders]
            for i in (i for i in numbers if i in holders):
                if lacking := tuple(d for d in devices if d not in holders[i]):
                    local[i] = tuple(holders[i]), lacking
    return Needs({devices: sorted(numbers, key=order.__getitem__) for devices, numbers in remote.items() if numbers},
                 dict(sorted(local.items())))


# --------------------------------------------------------------------------------------------- over the network


def _choose_tree_size(plan: ReshardPlan) -> ReshardPlan:
    """Choose how often classes leave their holders, and which holders send them: as many trees as possible (fewer
    hops) without a holder that sends much more than the busiest rank receives."""
    # What the busiest receiver gets cannot be avoided, so senders below that are not the bottleneck. `no_forwarding`
    # (trees of one node: holders serve every node themselves) has the fewest rounds and wins if it is within MIN_GAIN
    # of the best, `one_tree`; otherwise trees are made longer by doubling until the holders are light enough.
    received = max((x for group in plan.groups for x in elements_arriving(group).values()), default=0)
    if not received:
        return plan
    largest = max(len(group.nodes) for group in plan.groups)
    no_forwarding, one_tree = _with_trees(plan, 1, received), _with_trees(plan, largest, received)
    enough = max(received, _busiest_sender(one_tree)) * MIN_GAIN
    if _busiest_sender(no_forwarding) <= enough:
        return no_forwarding
    nodes_per_tree = 2
    while nodes_per_tree < largest:
        candidate = _with_trees(plan, nodes_per_tree, received)
        if _busiest_sender(candidate) <= enough:
            return candidate
        nodes_per_tree *= 2
    return one_tree


def _busiest_sender(plan: ReshardPlan) -> int:
    """The most elements that one rank sends over the network; a rank that forwards may also hold other classes."""
    sent_by_holder = {cell: -(-s.size // s.num_senders) for cell, s in plan.senders.items()}
    most = max(sent_by_holder.values())
    for group in plan.groups:
        if group.num_trees < len(group.nodes):
            for device, size in elements_arriving(group).items():
                cell = group.cells[device][0]
                most = max(most, size + (sent_by_holder.get(cell, 0) if cell is not None else 0))
    return most


def _with_trees(plan: ReshardPlan, nodes_per_tree: int, received: int) -> ReshardPlan:
    """The plan with broadcast trees of so many nodes each. received: elements that the busiest rank receives, and so
    what one rank may send without becoming the bottleneck."""
    # 1. how many trees each group needs
    trees = [-(-len(group.nodes) // nodes_per_tree) if group.arrivals else len(group.nodes) for group in plan.groups]
    # 2. how often each class leaves its holders
    copies: Counter[int] = Counter()
    for group, count in zip(plan.groups, trees, strict=True):
        for i in group.arrivals:
            copies[i] += count
    # 3. split these copies evenly over the holder cells
    by_holders: dict[tuple[Cell, ...], list[tuple[int, int]]] = defaultdict(list)
    for i, count in sorted(copies.items()):
        by_holders[plan.classes[i].holders].append((i, plan.classes[i].size * count))
    sent_parts: dict[int, list[Share]] = {i: [] for i in copies}
    totals = {holders: sum(size for _, size in items) for holders, items in by_holders.items()}
    for holders, amounts in balance(totals, {}).items():
        for i, (who, start, stop) in cut_at(by_holders[holders], amounts):
            start, stop = start // copies[i], stop // copies[i]
            if start < stop:
                sent_parts[i].append(Share(who, start, stop))
    # 4. elements that each cell sends to each tree of each group
    per_tree: dict[Cell, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for group_index, group in enumerate(plan.groups):
        for i in group.arrivals:
            for who, start, stop in sent_parts[i]:
                per_tree[plan.classes[i].holders[who]][group_index] += stop - start
    # 5. one record per cell, with as few sending ranks as keep each below the busiest receiver
    sent_by_cell = (sum(trees[g] * size for g, size in by_group.items()) for by_group in per_tree.values())
    limit = max(received, *(-(-size // plan.src.replicas) for size in sent_by_cell))
    senders = {}
    for cell in sorted(per_tree):
        offset, supplies = 0, []
        for group_index, size in sorted(per_tree[cell].items()):
            supplies.append(TreeSupply(group_index, trees[group_index], size, offset))
            offset += trees[group_index] * size
        senders[cell] = CellSender(offset, min(plan.src.replicas, -(-offset // limit)), tuple(supplies))
    groups = tuple(replace(group, num_trees=n) for group, n in zip(plan.groups, trees, strict=True))
    return replace(plan, groups=groups, sent_parts={i: tuple(parts) for i, parts in sent_parts.items()},
                   senders=senders)


def _busiest(plan: ReshardPlan) -> int:
    """The most elements that one rank sends or receives; an upper bound where it also forwards."""
    most = max((-(-s.size // s.num_senders) for s in plan.senders.values()), default=0)
    for group in plan.groups:
        arrived = arrivals_by_device(group.arrivals.values())
        sent, received = forwarded_by_device(arrived), Counter[int]()
        for needers, parts in arrived.items():
            received.update(dict.fromkeys(needers, sum(parts.values())))
            if group.num_trees < len(group.nodes):
                sent.update(parts)
        for copy in group.local_copies:
            sent[copy.src] += copy.stop - copy.start
            received[copy.dst] += copy.stop - copy.start
        for device, (cell, _) in enumerate(group.cells):
            sender = plan.senders.get(cell) if cell is not None else None
            if sender is not None:
                sent[device] += -(-sender.size // sender.num_senders)
        most = max(most, *sent.values(), *received.values(), 0)
    return most
