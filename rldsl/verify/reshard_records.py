"""The records of a reshard are right for every node group and every cell.

In: a `ReshardPlan`, and the cells of all ranks under its layouts. Out: faults (code, text, ranks). Proved for all
ranks, at a cost that grows with box classes, node groups and cells but not with their products: the planner's views of
the meshes are the layouts' (RL0527); of every family of groups, which want the same, that the lists of what it wants
are complete (RL0527); of every group, that a class is left out exactly if a device of the node holds it, that what
arrives is divided over its needers without a gap, and that copies inside the node bring every device the rest once
(RL0527), from devices that have it (RL0533); of every class that crosses the network, that its holders divide it
without a gap (RL0527); and of every cell, that it sends to each tree just its parts of what arrives there (RL0533).

So what remains are the formulas that turn these records into the slices of a rank. `transfer_slices.py` checks those on
ranks, all of them in a small world.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rldsl.reshard.arrivals import IntraNodeCopy, Wanted
from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.load_balance import Share
from rldsl.reshard.node_groups import MeshView
from rldsl.reshard.records import FamilyTrees, NodeGroup, ReshardPlan, TransferSlice
from rldsl.sharding.boxes import Cell

Fault = tuple[str, str, tuple[int, ...]]  # code, what is wrong, ranks
Slice = TransferSlice | IntraNodeCopy  # what a rank or a device sends in a step


class ClassIndex:
    """The box classes that a cell holds and needs."""

    def __init__(self, classes: Sequence[BoxClass]):
        self.held, self.needed = (defaultdict[Cell, set[int]](set) for _ in range(2))
        for i, box_class in enumerate(classes):
            for cell in box_class.holders:
                self.held[cell].add(i)
            for cell in box_class.needers:
                self.needed[cell].add(i)

    def lacking(self, held: Cell | None, cell: Cell | None) -> set[int]:
        """The box classes that a rank at `cell` of the destination needs and does not have at `held` of the source."""
        needed = self.needed.get(cell, set()) if cell is not None else set()
        return needed - self.held.get(held, set()) if held is not None else needed

    def holds(self, held: Cell | None, box_class: int) -> bool:
        return held is not None and box_class in self.held.get(held, ())


def record_faults(plan: ReshardPlan, src: Mapping[int, Cell], dst: Mapping[int, Cell],
                  index: ClassIndex) -> Iterator[Fault]:
    """src, dst: the cell of each rank. The groups must have the cells of their nodes."""
    for view, cells in ((plan.src, src), (plan.dst, dst)):
        yield from _view_faults(view, cells)
    families: dict[int, list[int]] = defaultdict(list)  # id of what a group wants -> such groups
    for number, group in enumerate(plan.groups):
        families[id(group.arrivals.wanted)].append(number)
    found = [_Family(plan, members) for members in families.values()]
    for family in found:
        examined: set[tuple[Cell | None, ...]] = set()
        sizes = [sum(one.sizes) for one in family.wanted.lists]
        for group in (plan.groups[number] for number in family.members):
            if (cells_of_devices := tuple(cell for _, cell in group.cells)) not in examined:
                examined.add(cells_of_devices)
                yield from _wanted_faults(plan, group, index)
            yield from _group_faults(plan, group, sizes, index)
    yield from _division_faults(plan, found)
    yield from _supply_faults(plan, found)


def arrived_before(arriving: Sequence[Slice], forwarded: Slice) -> bool:
    """Whether a rank received what it forwards in the step before; nothing is kept for longer. arriving: of the same
    box class."""
    before, at, end = forwarded.step - 1, forwarded.start, forwarded.stop
    for x in arriving:  # mostly it came in one slice
        if x.step == before and x.start <= at and end <= x.stop:
            return True
    for start, stop in sorted((x.start, x.stop) for x in arriving if x.step == before):
        if start <= at < stop:
            at = stop
    return at >= end


def covers_once(slices: Sequence[Slice | Share], size: int) -> bool:
    """Whether the slices of a box class make up [0, size), each element once."""
    if len(slices) == 1:  # as most arrive
        return slices[0].start == 0 and slices[0].stop == size > 0
    at = 0
    for start, stop in sorted([(x.start, x.stop) for x in slices]):
        if start != at or stop <= at:
            return False
        at = stop
    return at == size


def _view_faults(view: MeshView, cells: Mapping[int, Cell]) -> Iterator[Fault]:
    """Ranks that the planner sees at another cell, or as another replica of it."""
    count = Counter[Cell]()
    for rank, cell in cells.items():
        if view.cell(rank) != cell or view.replica(rank) != count[cell] or view.rank(cell, count[cell]) != rank:
            yield "RL0527", f"rank {rank} is not where its layout has it", (rank,)
        count[cell] += 1
    if wrong := [cell for cell, replicas in count.items() if replicas != view.replicas]:
        yield "RL0527", f"cell {wrong[0]} does not have {view.replicas} ranks", ()


def _wanted_faults(plan: ReshardPlan, group: NodeGroup, index: ClassIndex) -> Iterator[Fault]:
    """Classes that devices of a node want and that are not in the list of just these devices, or in it by mistake."""
    devices = defaultdict[int, list[int]](list)  # class -> devices that want it
    for device, (_, cell) in enumerate(group.cells):
        for i in index.needed.get(cell, ()) if cell is not None else ():
            devices[i].append(device)
    for one in group.arrivals.wanted.lists:
        for i, size in zip(one.classes, one.sizes, strict=True):
            if tuple(devices.pop(i, ())) != one.needers or size != plan.classes[i].size:
                yield "RL0527", f"box class {i} is not what devices {one.needers} of nodes {group.nodes[:4]} want", ()
    if devices:
        yield "RL0527", f"box class {min(devices)} is wanted on nodes {group.nodes[:4]} and in no list", ()


def _group_faults(plan: ReshardPlan, group: NodeGroup, sizes: Sequence[int], index: ClassIndex) -> Iterator[Fault]:
    """What is wrong with what one node receives. sizes: elements of each list of what it wants."""
    ranks = tuple(range(group.nodes[0] * plan.devices, (group.nodes[0] + 1) * plan.devices)) if group.nodes else ()
    arrivals, places = group.arrivals, group.arrivals.wanted.places
    if not 1 <= group.num_trees <= len(group.nodes):
        yield "RL0527", f"{len(group.nodes)} nodes cannot have {group.num_trees} trees", ranks
    holders = defaultdict[int, list[int]](list)  # wanted class -> devices that hold it
    for device, (cell, _) in enumerate(group.cells):
        for i in index.held.get(cell, ()) if cell is not None else ():
            if i in places:
                holders[i].append(device)
    held: list[list[int]] = [[] for _ in arrivals.wanted.lists]
    for i in holders:
        held[places[i][0]].append(places[i][1])
    for one, size, positions, given, bounds in zip(arrivals.wanted.lists, sizes, held, arrivals.held, arrivals.bounds,
                                                   strict=True):
        if tuple(sorted(positions)) != given:
            yield "RL0527", f"nodes {group.nodes[:4]} do not hold what they need not receive", ranks
        arriving = size - sum(one.sizes[position] for position in positions)
        if len(bounds) != len(one.needers) or sorted((0, *bounds)) != [0, *bounds] or bounds[-1] != arriving:
            yield "RL0527", f"devices {one.needers} of nodes {group.nodes[:4]} do not receive all that they lack", ranks
    yield from _copy_faults(plan, group, holders)


def _copy_faults(plan: ReshardPlan, group: NodeGroup, holders: Mapping[int, Sequence[int]]) -> Iterator[Fault]:
    """Copies inside a node that do not bring each device, once, what it lacks of classes that another device holds.
    holders: of each such class."""
    base = group.nodes[0] * plan.devices if group.nodes else 0
    came = defaultdict[tuple[int, int], list[IntraNodeCopy]](list)  # (class, device) -> what it gets
    for copy in group.local_copies:
        came[copy.box_class, copy.dst].append(copy)
    places, lists = group.arrivals.wanted.places, group.arrivals.wanted.lists
    lacked = {(i, device) for i, have in holders.items() for device in lists[places[i][0]].needers
              if device not in have}
    for i, device in lacked | came.keys():
        if not covers_once(came.get((i, device), ()), plan.classes[i].size if (i, device) in lacked else 0):
            yield "RL0527", f"rank {base + device} does not receive box class {i} exactly once", (base + device,)
    for copy in group.local_copies:
        if copy.src not in holders.get(copy.box_class, ()) and not arrived_before(
                came.get((copy.box_class, copy.src), ()), copy):
            yield ("RL0533", f"rank {base + copy.src} would send rank {base + copy.dst} a part of box class "
                   f"{copy.box_class} that it does not have in step {copy.step}", (base + copy.src, base + copy.dst))


class _Family:
    """Groups that want the same. members: their numbers; trees: of each; fewer: per class, the groups that hold it."""

    def __init__(self, plan: ReshardPlan, members: Sequence[int]):
        self.members, self.trees = tuple(members), tuple(plan.groups[g].num_trees for g in members)
        self.wanted: Wanted = plan.groups[members[0]].arrivals.wanted
        self.fewer = defaultdict[int, list[int]](list)
        for g in members:
            for i in plan.groups[g].arrivals.held_classes():
                self.fewer[i].append(g)

    def arriving(self) -> Iterator[int]:
        """Classes that some group of the family receives over the network."""
        return (i for i in self.wanted.places if len(self.fewer.get(i, ())) < len(self.members))


def _division_faults(plan: ReshardPlan, families: Sequence[_Family]) -> Iterator[Fault]:
    """Classes that cross the network and are not divided over their holders without a gap."""
    for i in {i for family in families for i in family.arriving()}:
        parts, box_class = plan.sent_parts.get(i, ()), plan.classes[i]
        if not covers_once(parts, box_class.size) or not all(0 <= x.who < len(box_class.holders) for x in parts):
            yield "RL0527", f"the holders of box class {i} do not send it exactly once", ()


def _supply_faults(plan: ReshardPlan, families: Sequence[_Family]) -> Iterator[Fault]:
    """Cells that do not send each tree of each group just their parts of the classes that arrive there."""
    amounts, fewer = (defaultdict[Cell, dict[int, int]](lambda: defaultdict(int)) for _ in range(2))
    # amounts: cell -> number of the family -> elements for each tree; fewer: cell -> group -> elements less
    for number, family in enumerate(families):
        for i in family.wanted.places:
            for who, start, stop in plan.sent_parts.get(i, ()):
                cell = plan.classes[i].holders[who]
                amounts[cell][number] += stop - start
                for group in family.fewer.get(i, ()):
                    fewer[cell][group] += stop - start
    totals = [sum(family.trees) for family in families]
    right = dict[int, int]()  # id of a record of trees -> number of the family that it states correctly
    first = {family.members[0]: number for number, family in enumerate(families)}

    def number_of(trees: FamilyTrees) -> int:
        if id(trees) not in right:
            number = first.get(trees.groups[0], -1) if trees.groups else -1
            same = number >= 0 and (families[number].members, families[number].trees) == (trees.groups, trees.trees)
            right[id(trees)] = number if same else -1
        return right[id(trees)]

    for cell, by_family in amounts.items():
        size = (sum(amount * totals[number] for number, amount in by_family.items())
                - sum(amount * plan.groups[group].num_trees for group, amount in fewer[cell].items()))
        sender = plan.senders.get(cell)
        if sender is None:
            if size:
                yield "RL0533", f"cell {cell} has to send {size} elements, and sends nothing", ()
            continue
        stated = [(number_of(trees), amount) for trees, amount in sender.supplies.families]
        less = [(e.group, e.trees, e.amount) for e in sender.supplies.fewer]
        if (sorted(stated) != sorted(by_family.items()) or sender.size != size
                or less != [(g, plan.groups[g].num_trees, amount) for g, amount in sorted(fewer[cell].items())]):
            yield "RL0533", f"what cell {cell} sends is not what the groups of nodes expect from it", ()
        if not 1 <= sender.num_senders <= plan.src.replicas:
            yield "RL0533", f"cell {cell} has {plan.src.replicas} ranks, and {sender.num_senders} send", ()
    for cell in plan.senders.keys() - amounts.keys():
        yield "RL0533", f"cell {cell} sends what nobody needs from it", ()
