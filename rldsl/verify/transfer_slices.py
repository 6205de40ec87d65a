"""What each rank sends and receives in a resharding, against what every other rank expects.

In: the `ReshardPlan` of a resharding and its two layouts. Out: faults (code, text, ranks). Proved for a rank: of every
box class that it needs and lacks it receives each element once, and nothing of any other class (RL0527); each slice is
in the lists of both ends, in the same step, and its sender holds the class or received the slice in the step before
(RL0533); and a batch of messages that are posted together has at most `MAX_MESSAGES` (RL0535).

Small worlds are checked rank by rank. In large ones, some nodes of each group are checked, with all ranks they exchange
with: what a rank does depends on its node group, its device, and its position in a tree or among the holders, by
formulas all of whose cases occur in the nodes that are checked (`tests/verify/test_sampled_ranks.py` compares with a
check of all ranks). That every node belongs to the group that lists it is checked for all nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.broadcast_trees import TREES, children, depth
from rldsl.reshard.in_place import MAX_PARTS
from rldsl.reshard.records import NodeGroup, ReshardPlan
from rldsl.reshard.transfer_slices import ReshardCache, rank_slices, tree_position
from rldsl.sharding.boxes import Cell
from rldsl.sharding.message_batches import MAX_MESSAGES, message_batches

CHECK_ALL_UP_TO = 64  # ranks; of more, a sample is checked

Fault = tuple[str, str, tuple[int, ...]]  # code, what is wrong, ranks


@dataclass(frozen=True, slots=True)
class MeshCells:
    """A layout on its mesh, derived here again and not taken from the planner."""

    cells: Mapping[int, Cell]  # the cell of each rank

    @staticmethod
    def of(layout: Layout, mesh: Mesh) -> MeshCells:
        ranks_per_stage, parts = layout.dp * layout.cp * layout.tp, layout.ep * layout.tp
        ranks_per_zero_shard = layout.cp * parts
        return MeshCells({
            rank: Cell(i // ranks_per_stage, i % parts,
                       i % ranks_per_stage // ranks_per_zero_shard if layout.zero else 0)
            for i, rank in enumerate(mesh.members())})


Interval = tuple[int, int, int, int]  # (step, box class, start, stop): a slice without its peer


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices of a rank."""

    sends: Mapping[int, Sequence[Interval]]  # to each peer
    receives: Mapping[int, Sequence[Interval]]  # from each peer

    @staticmethod
    def of(plan: ReshardPlan, rank: int, cache: ReshardCache) -> RankSlices:
        sends, receives = defaultdict[int, list[Interval]](list), defaultdict[int, list[Interval]](list)
        out, into = rank_slices(plan, rank, cache)
        for step, peer, box_class, start, stop in out:
            sends[peer].append((step, box_class, start, stop))
        for step, peer, box_class, start, stop in into:
            receives[peer].append((step, box_class, start, stop))
        return RankSlices(sends, receives)

    def by_class(self) -> Mapping[int, Sequence[Interval]]:
        """What arrives of each box class."""
        arriving = defaultdict[int, list[Interval]](list)
        for intervals in self.receives.values():
            for interval in intervals:
                arriving[interval[1]].append(interval)
        return arriving


def missing_elements(classes: Sequence[BoxClass], src: MeshCells, dst: MeshCells) -> int:
    """The number of elements that ranks of the destination need and do not hold, over all ranks."""
    pairs = Counter((src.cells.get(rank), cell) for rank, cell in dst.cells.items())
    index = _ClassIndex(classes)
    return sum(count * sum(classes[i].size for i in index.lacking(held, cell)) for (held, cell), count in pairs.items())


class _ClassIndex:
    """The box classes that a cell holds and needs."""

    def __init__(self, classes: Sequence[BoxClass]):
        self.held, self.needed = (defaultdict[Cell, set[int]](set) for _ in range(2))
        for i, box_class in enumerate(classes):
            for cell in box_class.holders:
                self.held[cell].add(i)
            for cell in box_class.needers:
                self.needed[cell].add(i)
        self.known: dict[tuple[Cell | None, Cell | None], frozenset[int]] = {}

    def lacking(self, held: Cell | None, cell: Cell | None) -> frozenset[int]:
        """The box classes that a rank at `cell` of the destination needs and does not have at `held` of the source."""
        if (held, cell) not in self.known:
            need: set[int] = self.needed.get(cell, set()) if cell is not None else set()
            self.known[held, cell] = frozenset(need - self.held.get(held, set()) if held is not None else need)
        return self.known[held, cell]

    def holds(self, held: Cell | None, box_class: int) -> bool:
        return held is not None and box_class in self.held.get(held, ())


def slice_faults(plan: ReshardPlan, src: MeshCells, dst: MeshCells, world: int) -> Iterator[Fault]:
    """world: the number of all ranks."""
    if faults := [*_group_faults(plan, src, dst)]:
        yield from faults  # with wrong groups the slices of a rank may not even be defined
        return
    cache, paired = _SliceCache(plan), set[tuple[int, int]]()
    for rank in sampled_ranks(plan, src, dst):
        held, arriving = src.cells.get(rank), cache.of(rank).by_class()
        yield from _coverage_faults(plan, rank, cache.index.lacking(held, dst.cells.get(rank)), arriving)
        yield from _pairing_faults(rank, cache, paired)
        yield from _holding_faults(rank, held, cache, arriving)
        yield from _batch_faults(rank, cache.of(rank), world)


class _SliceCache:
    """The slices of ranks, each computed when it is first asked for."""

    def __init__(self, plan: ReshardPlan):
        self.plan = plan
        self.by_rank: dict[int, RankSlices] = {}
        self.common, self.index = ReshardCache(plan), _ClassIndex(plan.classes)

    def of(self, rank: int) -> RankSlices:
        if rank not in self.by_rank:
            self.by_rank[rank] = RankSlices.of(self.plan, rank, self.common)
        return self.by_rank[rank]


def _coverage_faults(plan: ReshardPlan, rank: int, lacks: Set[int],
                     arriving: Mapping[int, Sequence[Interval]]) -> Iterator[Fault]:
    """Box classes that a rank lacks and does not receive exactly once, or receives and does not lack."""
    for i in sorted(lacks | arriving.keys()):
        box_class = plan.classes[i]
        if not _covers_once(arriving.get(i, ()), box_class.size if i in lacks else 0):
            boxes = ", ".join(f"{e.spec} {e.box}" for e in box_class.segments[:2])
            yield "RL0527", f"rank {rank} does not receive box class {i} ({boxes}) exactly once", (rank,)


def _pairing_faults(rank: int, cache: _SliceCache, paired: set[tuple[int, int]]) -> Iterator[Fault]:
    """Pairs of ranks whose ends do not list the same slices in the same order. paired: the (sender, receiver) pairs
    that have been compared."""
    mine = cache.of(rank)
    for peer in sorted({*mine.sends, *mine.receives}):
        other = cache.of(peer)
        for a, b, sends, receives in ((rank, peer, mine, other), (peer, rank, other, mine)):
            if (a, b) not in paired:
                paired.add((a, b))
                if sends.sends.get(b, ()) != receives.receives.get(a, ()):
                    yield "RL0533", f"what rank {a} sends to rank {b} is not what that rank expects", (a, b)


def _holding_faults(rank: int, held: Cell | None, cache: _SliceCache,
                    arriving: Mapping[int, Sequence[Interval]]) -> Iterator[Fault]:
    """Slices that a rank sends although it neither holds them nor received them in the step before."""
    for peer, intervals in cache.of(rank).sends.items():
        for interval in intervals:
            step, box_class, _, _ = interval
            if not cache.index.holds(held, box_class) and not _arrived_before(arriving.get(box_class, ()), interval):
                yield ("RL0533", f"rank {rank} would send rank {peer} a part of box class {box_class} that it does "
                       f"not have in step {step}", (rank, peer))


def _batch_faults(rank: int, mine: RankSlices, world: int) -> Iterator[Fault]:
    """Batches with too many messages. A round has at most one message to and one from a peer, each in a few parts;
    `sharding/message_batches.py` divides peers into batches, the same at both ends of a pair."""
    for peers in message_batches(rank, {*mine.sends, *mine.receives}, world, MAX_MESSAGES // MAX_PARTS):
        posted = MAX_PARTS * sum((peer in mine.sends) + (peer in mine.receives) for peer in peers)
        if posted > MAX_MESSAGES:
            yield "RL0535", f"rank {rank} posts up to {posted} messages at once, more than {MAX_MESSAGES}", (rank,)


def _covers_once(slices: Sequence[Interval], size: int) -> bool:
    """Whether the slices of a box class make up [0, size), each element once."""
    at = 0
    for start, stop in sorted((start, stop) for _, _, start, stop in slices):
        if start != at or stop <= at:
            return False
        at = stop
    return at == size


def _arrived_before(arriving: Sequence[Interval], forwarded: Interval) -> bool:
    """Whether a rank received what it forwards in the step before; nothing is kept for longer."""
    send_step, _, at, end = forwarded
    for start, stop in sorted((start, stop) for step, _, start, stop in arriving if step == send_step - 1):
        if start <= at < stop:
            at = stop
    return at >= end


# ------------------------------------------------------------------------------------------------------- groups


def _group_faults(plan: ReshardPlan, src: MeshCells, dst: MeshCells) -> Iterator[Fault]:
    """Nodes in which a rank lacks something and that are not in exactly one group, or whose ranks have other cells than
    the group says."""
    groups_of_node = Counter(node for group in plan.groups for node in group.nodes)
    if twice := [node for node, count in groups_of_node.items() if count > 1]:
        yield "RL0527", f"nodes {twice[:4]} are in several groups", ()
    index = _ClassIndex(plan.classes)
    for rank, cell in dst.cells.items():
        if rank // plan.devices not in groups_of_node and index.lacking(src.cells.get(rank), cell):
            yield "RL0527", f"rank {rank} lacks parameters, and its node is in no group", (rank,)
    for group in plan.groups:
        for node in group.nodes:
            ranks = range(node * plan.devices, (node + 1) * plan.devices)
            if group.cells != tuple((src.cells.get(r), dst.cells.get(r)) for r in ranks):
                yield "RL0527", f"node {node} does not have the cells of the group that lists it", tuple(ranks)


def sampled_ranks(plan: ReshardPlan, src: MeshCells, dst: MeshCells) -> Sequence[int]:
    """The ranks that are checked: all of a small world. Of a large one, those of the last node of each group and of the
    first node at each position in its trees, and the first, middle and last holder of what crosses the network."""
    members = src.cells.keys() | dst.cells.keys()
    if len(members) <= CHECK_ALL_UP_TO:
        return sorted(members)
    sample: set[int] = set()
    for group in plan.groups:
        seen: set[object] = set()
        for index, node in enumerate(group.nodes):
            if (position := _tree_position(group, index)) not in seen or node == group.nodes[-1]:
                seen.add(position)
                sample.update(range(node * plan.devices, (node + 1) * plan.devices))
    holders: dict[Cell, list[int]] = defaultdict(list)
    for rank, cell in src.cells.items():
        holders[cell].append(rank)
    for cell in plan.senders:
        sample.update(holders[cell][i] for i in (0, len(holders[cell]) // 2, -1))
    return sorted(sample & members)


def _tree_position(group: NodeGroup, index: int) -> tuple[int, ...]:
    """The position of the group's `index`th node in its trees: (whether there are other nodes in them, and for each
    tree the node's depth and number of children). Empty where every node is a tree of its own."""
    if group.num_trees == len(group.nodes):
        return ()
    _, first, count = tree_position(group, index)
    return (count > 1, *(x for tree in TREES for x in (depth(count, tree, index - first),
                                                       len(children(count, tree, index - first)))))
