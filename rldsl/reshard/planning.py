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
from dataclasses import dataclass, replace
from functools import lru_cache

from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh, Model
from rldsl.plan.notation import degrees_text
from rldsl.reshard.arrivals import Wanted, WantedList, forwarded_by_device
from rldsl.reshard.box_classes import BoxClass, box_classes
from rldsl.reshard.intra_node import Needs, elements_arriving, node_group
from rldsl.reshard.load_balance import Share, balance, cut_at
from rldsl.reshard.node_groups import CellPairs, MeshView, node_groups
from rldsl.reshard.records import CellSender, FamilyTrees, FewerElements, NodeGroup, ReshardPlan, Supplies
from rldsl.sharding.boxes import Cell
from rldsl.sharding.layout import check_mesh

MIN_GAIN = 1.125  # forwarding along trees costs rounds: it must lighten the busiest rank by this factor


def plan_reshard(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                 devices_per_node: int) -> ReshardPlan:
    """How `model` gets from layout `src` to layout `dst`, on meshes of the given devices per node. Computed once for
    everyone who asks: passes, the memory estimate, the verifier, and each rank of a run."""
    bare = Model("", "causal_lm", "", "float32", model.params, model.layers, "")  # nothing else of a model matters
    return _plan_reshard(bare, *_nameless(src, src_mesh), *_nameless(dst, dst_mesh), devices_per_node)


def _nameless(layout: Layout, mesh: Mesh) -> tuple[Layout, Mesh]:
    """The same without names and backend, on which no reshard depends. Errors: InternalError if the layout is on
    another mesh."""
    check_mesh(layout, mesh)
    degrees = degrees_text(layout.dp, layout.tp, layout.pp, layout.cp, layout.zero, layout.ep, layout.vpp)
    return replace(layout, id=degrees, mesh="", backend=DEFAULT_BACKEND), replace(mesh, id="")


@lru_cache(maxsize=64)
def _plan_reshard(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                  devices_per_node: int) -> ReshardPlan:
    src_view, dst_view = MeshView.of(src, src_mesh), MeshView.of(dst, dst_mesh)
    classes = box_classes(model, src, dst)
    needs = _NodeNeeds(classes)
    groups = (node_group(needs.sizes, nodes, cells, needs.of(cells))
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


def _adjacent_by_holders(classes: Sequence[BoxClass]) -> Sequence[int]:
    """The position of each class when classes with the same holders are adjacent, so that a device hears from few
    peers. Compared by zero shard first: all zero shards hold what is not divided otherwise."""
    keys = [[(c.pp_rank, c.zero_shard, c.part) for c in box_class.holders] for box_class in classes]
    order = sorted(range(len(classes)), key=lambda i: (keys[i], i))
    return [position for _, position in sorted(zip(order, range(len(classes)), strict=True))]


class _NodeNeeds:
    """What the devices of a node lack. What devices want depends on their destination cells alone, so it is found once
    for all nodes with the same; what they hold already is looked up node by node."""

    def __init__(self, classes: Sequence[BoxClass]):
        self.sizes = [c.size for c in classes]
        self.held_by, self.order = _by_holder(classes), _adjacent_by_holders(classes)
        self.needed_by: dict[tuple[Cell, ...], list[int]] = defaultdict(list)  # cells -> classes that just these need
        for i, box_class in enumerate(classes):
            self.needed_by[box_class.needers].append(i)
        self.with_cell: dict[Cell, list[int]] = defaultdict(list)  # cell -> positions in `needed_by`
        for position, needers in enumerate(self.needed_by):
            for cell in needers:
                self.with_cell[cell].append(position)
        self.needers = tuple(self.needed_by)
        self.known: dict[tuple[Cell | None, ...], Wanted] = {}  # destination cells of the devices -> what they want

    def of(self, cells: CellPairs) -> Needs:
        """cells: of each device, under source and destination."""
        dst_cells = tuple(dst for _, dst in cells)
        if dst_cells not in self.known:
            self.known[dst_cells] = self._wanted(dst_cells)
        wanted = self.known[dst_cells]
        holders = defaultdict[int, list[int]](list)  # wanted class -> devices that hold it
        for device, (src_cell, _) in enumerate(cells):
            for i in self.held_by.get(src_cell, ()) if src_cell is not None else ():
                if i in wanted.places:
                    holders[i].append(device)
        held: list[list[int]] = [[] for _ in wanted.lists]
        local: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # class -> (devices that hold, that lack it)
        for i, devices in sorted(holders.items()):
            at, position = wanted.places[i]
            held[at].append(position)
            if lacking := tuple(d for d in wanted.lists[at].needers if d not in devices):
                local[i] = tuple(devices), lacking
        return Needs(wanted, tuple(tuple(sorted(positions)) for positions in held), local)

    def _wanted(self, cells: Sequence[Cell | None]) -> Wanted:
        devices_at = defaultdict[Cell, list[int]](list)
        for device, cell in enumerate(cells):
            if cell is not None:
                devices_at[cell].append(device)
        found = defaultdict[tuple[int, ...], list[int]](list)  # devices -> classes that just these want
        for position in sorted({x for cell in devices_at for x in self.with_cell.get(cell, ())}):
            needers = self.needers[position]
            devices = tuple(sorted(d for cell in needers for d in devices_at.get(cell, ())))
            found[devices] += self.needed_by[needers]
        return Wanted(tuple(WantedList(devices, tuple(numbers), tuple(self.sizes[i] for i in numbers))
                            for devices, unordered in found.items()
                            for numbers in (sorted(unordered, key=self.order.__getitem__),)))


# --------------------------------------------------------------------------------------------- over the network


@dataclass(frozen=True, slots=True)
class _Copies:
    """How often classes leave their holders with broadcast trees of some size."""

    trees: Sequence[int]  # how many each group has
    families: Sequence[tuple[Wanted, FamilyTrees]]  # the groups that want the same, and the trees of each
    counts: Mapping[int, int]  # how often each class leaves its holders, by its number, ascending; of those that do


@dataclass(frozen=True, slots=True)
class _Division:
    """How holders divide between them what leaves them."""

    copies: _Copies
    parts: Mapping[int, Sequence[Share]]  # class -> what each holder cell sends of it
    sent: Mapping[Cell, tuple[int, int]]  # cell -> elements that its ranks send, and how many of its ranks send them


def _choose_tree_size(plan: ReshardPlan) -> ReshardPlan:
    """Choose how often classes leave their holders, and which holders send them: as many trees as possible (fewer
    hops) without a holder that sends much more than the busiest rank receives."""
    # What the busiest receiver gets cannot be avoided, so senders below that are not the bottleneck. `no_forwarding`
    # (trees of one node: holders serve every node themselves) has the fewest rounds and wins if it is within MIN_GAIN
    # of the best, `one_tree`; otherwise trees are made longer by doubling until the holders are light enough.
    received = max((x for group in plan.groups for x in elements_arriving(group).values()), default=0)
    if not received:
        return plan
    no_forwarding = _light_enough(plan, 1, received, received * MIN_GAIN)
    if no_forwarding is not None:  # whatever one tree would give
        return _with_senders(plan, no_forwarding)
    largest = max(len(group.nodes) for group in plan.groups)
    one_tree = _division(plan, _copies(plan, largest), received)
    enough = max(received, _busiest_sender(plan, one_tree)) * MIN_GAIN
    nodes_per_tree = 1
    while nodes_per_tree < largest:
        found = _light_enough(plan, nodes_per_tree, received, enough)
        if found is not None:
            return _with_senders(plan, found)
        nodes_per_tree *= 2
    return _with_senders(plan, one_tree)


def _light_enough(plan: ReshardPlan, nodes_per_tree: int, received: int, enough: float) -> _Division | None:
    """The division with broadcast trees of `nodes_per_tree` nodes; None if a rank then sends more than `enough`."""
    copies = _copies(plan, nodes_per_tree)
    if _busiest_at_least(plan, copies) > enough:
        return None
    found = _division(plan, copies, received)
    return found if _busiest_sender(plan, found) <= enough else None


def _copies(plan: ReshardPlan, nodes_per_tree: int) -> _Copies:
    """The copies with broadcast trees of `nodes_per_tree` nodes."""
    trees = [-(-len(group.nodes) // nodes_per_tree) if group.arrivals else len(group.nodes) for group in plan.groups]
    families = _families(plan.groups, trees)
    counts: Counter[int] = Counter()
    for wanted, family in families:
        counts.update(dict.fromkeys(wanted.places, family.ends[-1]))
    for group, count in zip(plan.groups, trees, strict=True):
        counts.subtract(dict.fromkeys(group.arrivals.held_classes(), count))
    return _Copies(trees, families, {i: count for i, count in sorted(counts.items()) if count})


def _busiest_at_least(plan: ReshardPlan, copies: _Copies) -> float:
    """A lower bound of `_busiest_sender`: classes with the same holders, divided over all of their ranks."""
    totals = Counter[tuple[Cell, ...]]()
    for i, count in copies.counts.items():
        totals[plan.classes[i].holders] += plan.classes[i].size * count
    return max(total / (len(holders) * plan.src.replicas) for holders, total in totals.items())


def _busiest_sender(plan: ReshardPlan, division: _Division) -> int:
    """The most elements that one rank sends over the network; a rank that forwards may also hold other classes."""
    sent_by_holder = {cell: -(-size // ranks) for cell, (size, ranks) in division.sent.items()}
    most = max(sent_by_holder.values())
    for group, trees in zip(plan.groups, division.copies.trees, strict=True):
        if trees < len(group.nodes):
            for device, size in elements_arriving(group).items():
                cell = group.cells[device][0]
                most = max(most, size + (sent_by_holder.get(cell, 0) if cell is not None else 0))
    return most


def _division(plan: ReshardPlan, copies: _Copies, received: int) -> _Division:
    """Copies of classes, split evenly over the cells that hold them; of each cell, as few ranks send as keep each below
    the busiest receiver. received: elements that the busiest rank receives, and so what one rank may send without
    becoming the bottleneck."""
    by_holders: dict[tuple[Cell, ...], list[tuple[int, int]]] = defaultdict(list)
    for i, count in copies.counts.items():
        by_holders[plan.classes[i].holders].append((i, plan.classes[i].size * count))
    parts: dict[int, list[Share]] = {i: [] for i in copies.counts}
    sent: dict[Cell, int] = defaultdict(int)
    totals = {holders: sum(size for _, size in items) for holders, items in by_holders.items()}
    for holders, amounts in balance(totals, {}).items():
        for i, (who, start, stop) in cut_at(by_holders[holders], amounts):
            count = copies.counts[i]
            start, stop = start // count, stop // count
            if start < stop:
                parts[i].append(Share(who, start, stop))
                sent[holders[who]] += count * (stop - start)
    limit = max(received, *(-(-size // plan.src.replicas) for size in sent.values()))
    return _Division(copies, parts, {cell: (size, min(plan.src.replicas, -(-size // limit)))
                                     for cell, size in sorted(sent.items())})


def _with_senders(plan: ReshardPlan, division: _Division) -> ReshardPlan:
    """The plan with a record for each cell that sends."""
    trees, families, parts = division.copies.trees, division.copies.families, division.parts
    # elements that each cell sends to each tree of a group: by family, and less for groups that hold some of it
    per_family: dict[Cell, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    less: dict[Cell, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number, (wanted, _) in enumerate(families):
        for i in wanted.places:
            for who, start, stop in parts.get(i, ()):
                per_family[plan.classes[i].holders[who]][number] += stop - start
    for group_index, group in enumerate(plan.groups):
        for i in group.arrivals.held_classes():
            for who, start, stop in parts.get(i, ()):
                less[plan.classes[i].holders[who]][group_index] += stop - start
    senders = {cell: CellSender(size, ranks, Supplies(
        tuple((families[number][1], amount) for number, amount in sorted(per_family[cell].items())),
        tuple(FewerElements(g, trees[g], amount) for g, amount in sorted(less[cell].items()))))
        for cell, (size, ranks) in division.sent.items()}
    groups = tuple(replace(group, num_trees=n) for group, n in zip(plan.groups, trees, strict=True))
    return replace(plan, groups=groups, sent_parts={i: tuple(shares) for i, shares in parts.items()}, senders=senders)


def _families(groups: Sequence[NodeGroup], trees: Sequence[int]) -> Sequence[tuple[Wanted, FamilyTrees]]:
    """The groups that want the same, and the trees of each."""
    members: dict[int, list[int]] = defaultdict(list)
    for group_index, group in enumerate(groups):
        members[id(group.arrivals.wanted)].append(group_index)
    return [(groups[found[0]].arrivals.wanted, FamilyTrees(tuple(found), tuple(trees[g] for g in found)))
            for found in members.values()]


def _busiest(plan: ReshardPlan) -> int:
    """The most elements that one rank sends or receives; an upper bound where it also forwards."""
    most = max((-(-s.size // s.num_senders) for s in plan.senders.values()), default=0)
    for group in plan.groups:
        arrived = group.arrivals.by_device
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
