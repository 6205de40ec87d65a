"""What each rank sends and receives in a resharding, against what every other rank expects.

In: the `ReshardPlan` of a resharding and its two layouts. Out: faults (code, text, ranks). Proved for a rank: of every
shard class that it needs and lacks it receives each element once, and nothing of any other class (RL0527); each slice
is in the lists of both ends, in the same step, and its sender holds the class or received the slice in the step before
(RL0533); and a batch of messages that are posted together has at most `MAX_MESSAGES` (RL0535).

Small worlds are checked rank by rank. In large ones, some nodes of each group are checked, with everybody they exchange
with: what a rank does depends on its node group, its device, and its position in a tree or among the holders, by
formulas all of whose cases occur in the nodes that are checked (`tests/verify/test_sampled_ranks.py` compares with a
check of all ranks). That every node belongs to the group that lists it is checked for all nodes. """

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

FEW = 64  # ranks that are all looked at

Fault = tuple[str, str, tuple[int, ...]]  # code, what is wrong, ranks


@dataclass(frozen=True, slots=True)
class MeshCells:
    """A layout on its mesh. cells: where each rank stands, derived here once more."""

    cells: Mapping[int, Cell]

    @staticmethod
    def of(x: Layout, mesh: Mesh) -> MeshCells:
        stage, part = x.dp * x.cp * x.tp, x.ep * x.tp
        shard = x.cp * part
        return MeshCells({r: Cell(i // stage, i % part, i % stage // shard if x.zero else 0)
                     for i, r in enumerate(mesh.members())})


Interval = tuple[int, int, int, int]  # (step, box class, start, stop): a slice without its peer


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices of a rank."""

    sends: Mapping[int, Sequence[Interval]]  # to each peer
    receives: Mapping[int, Sequence[Interval]]  # from each peer

    @staticmethod
    def of(p: ReshardPlan, rank: int, known: ReshardCache) -> RankSlices:
        sends, receives = defaultdict[int, list[Interval]](list), defaultdict[int, list[Interval]](list)
        out, into = rank_slices(p, rank, known)
        for step, peer, box_class, start, stop in out:
            sends[peer].append((step, box_class, start, stop))
        for step, peer, box_class, start, stop in into:
            receives[peer].append((step, box_class, start, stop))
        return RankSlices(sends, receives)

    def by_class(self) -> Mapping[int, Sequence[Interval]]:
        """What arrives of each box class."""
        found = defaultdict[int, list[Interval]](list)
        for intervals in self.receives.values():
            for interval in intervals:
                found[interval[1]].append(interval)
        return found


def missing_elements(lines: Sequence[BoxClass], src: MeshCells, dst: MeshCells) -> int:
    """Elements that all ranks of the destination together do not have."""
    pairs = Counter((src.cells.get(rank), cell) for rank, cell in dst.cells.items())
    index = _ClassIndex(lines)
    return sum(count * sum(lines[i].size for i in index.lacking(held, cell)) for (held, cell), count in pairs.items())


class _ClassIndex:
    """The box classes that a cell holds and needs."""

    def __init__(self, lines: Sequence[BoxClass]):
        self.held, self.needed = (defaultdict[Cell, set[int]](set) for _ in range(2))
        for i, line in enumerate(lines):
            for cell in line.holders:
                self.held[cell].add(i)
            for cell in line.needers:
                self.needed[cell].add(i)
        self.known: dict[tuple[Cell | None, Cell | None], frozenset[int]] = {}

    def lacking(self, held: Cell | None, cell: Cell | None) -> frozenset[int]:
        """What a rank at `cell` of the destination needs that it does not have at `held` of the source."""
        if (held, cell) not in self.known:
            need: set[int] = self.needed.get(cell, set()) if cell is not None else set()
            self.known[held, cell] = frozenset(need - self.held.get(held, set()) if held is not None else need)
        return self.known[held, cell]

    def holds(self, held: Cell | None, box_class: int) -> bool:
        return held is not None and box_class in self.held.get(held, ())


def slice_faults(p: ReshardPlan, src: MeshCells, dst: MeshCells, world: int) -> Iterator[Fault]:
    """world: the number of all ranks."""
    if found := [*_group_faults(p, src, dst)]:
        yield from found  # otherwise the slices of a rank may not even be defined
        return
    known, paired = _SliceCache(p), set[tuple[int, int]]()
    for rank in sampled_ranks(p, src, dst):
        held, arriving = src.cells.get(rank), known.of(rank).by_class()
        yield from _coverage_faults(p, rank, known.index.lacking(held, dst.cells.get(rank)), arriving)
        yield from _pairing_faults(rank, known, paired)
        yield from _holding_faults(rank, held, known, arriving)
        yield from _batch_faults(rank, known.of(rank), world)


class _SliceCache:
    """Those of the ranks that were asked for."""

    def __init__(self, p: ReshardPlan):
        self.p = p
        self.known: dict[int, RankSlices] = {}
        self.common, self.index = ReshardCache(p), _ClassIndex(p.classes)

    def of(self, rank: int) -> RankSlices:
        if rank not in self.known:
            self.known[rank] = RankSlices.of(self.p, rank, self.common)
        return self.known[rank]


def _coverage_faults(p: ReshardPlan, rank: int, lacks: Set[int],
                     arriving: Mapping[int, Sequence[Interval]]) -> Iterator[Fault]:
    """Of every box class that a rank lacks it receives each element once, and of any other nothing."""
    for i in sorted(lacks | arriving.keys()):
        line = p.classes[i]
        if not _covers_once(arriving.get(i, ()), line.size if i in lacks else 0):
            what = ", ".join(f"{e.spec} {e.box}" for e in line.segments[:2])
            yield "RL0527", f"rank {rank} does not receive box class {i} ({what}) exactly once", (rank,)


def _pairing_faults(rank: int, known: _SliceCache, paired: set[tuple[int, int]]) -> Iterator[Fault]:
    """Both ends of a pair list the same slices, in the same order. paired: (sender, receiver)s that were compared."""
    mine = known.of(rank)
    for peer in sorted({*mine.sends, *mine.receives}):
        other = known.of(peer)
        for a, b, sends, receives in ((rank, peer, mine, other), (peer, rank, other, mine)):
            if (a, b) not in paired:
                paired.add((a, b))
                if sends.sends.get(b, ()) != receives.receives.get(a, ()):
                    yield "RL0533", f"what rank {a} sends to rank {b} is not what that rank expects", (a, b)


def _holding_faults(rank: int, held: Cell | None, known: _SliceCache,
                    arriving: Mapping[int, Sequence[Interval]]) -> Iterator[Fault]:
    """What a rank sends it holds, or it came in the step before."""
    for peer, slices in known.of(rank).sends.items():
        for piece in slices:
            if not known.index.holds(held, piece[1]) and not _arrived_before(arriving.get(piece[1], ()), piece):
                yield ("RL0533", f"rank {rank} would send rank {peer} a part of box class {piece[1]} that it does "
                       f"not have in step {piece[0]}", (rank, peer))


def _batch_faults(rank: int, mine: RankSlices, world: int) -> Iterator[Fault]:
    """A round has at most one message to and one from a peer, each in a few parts, cut by the rule of
    `sharding/message_batches.py`: a pair is in one batch at both ends."""
    for peers in message_batches(rank, {*mine.sends, *mine.receives}, world, MAX_MESSAGES // MAX_PARTS):
        posted = MAX_PARTS * sum((peer in mine.sends) + (peer in mine.receives) for peer in peers)
        if posted > MAX_MESSAGES:
            yield "RL0535", f"rank {rank} posts up to {posted} messages at once, more than {MAX_MESSAGES}", (rank,)


def _covers_once(slices: Sequence[Interval], size: int) -> bool:
    """Whether the slices of a line are [0, size), each element once."""
    at = 0
    for start, stop in sorted((start, stop) for _, _, start, stop in slices):
        if start != at or stop <= at:
            return False
        at = stop
    return at == size


def _arrived_before(arriving: Sequence[Interval], piece: Interval) -> bool:
    """Whether what a piece sends on came in the step before: nothing is kept for longer."""
    due, _, at, end = piece
    for start, stop in sorted((start, stop) for step, _, start, stop in arriving if step == due - 1):
        if start <= at < stop:
            at = stop
    return at >= end


# ------------------------------------------------------------------------------------------------------- groups


def _group_faults(p: ReshardPlan, src: MeshCells, dst: MeshCells) -> Iterator[Fault]:
    """Every node in which a rank lacks something is of one group, whose ranks stand as the group says."""
    of = Counter(node for group in p.groups for node in group.nodes)
    if twice := [node for node, count in of.items() if count > 1]:
        yield "RL0527", f"nodes {twice[:4]} are in several groups", ()
    index = _ClassIndex(p.classes)
    for rank, cell in dst.cells.items():
        if rank // p.devices not in of and index.lacking(src.cells.get(rank), cell):
            yield "RL0527", f"rank {rank} lacks parameters, and its node is in no group", (rank,)
    for group in p.groups:
        for node in group.nodes:
            ranks = range(node * p.devices, (node + 1) * p.devices)
            if group.cells != tuple((src.cells.get(r), dst.cells.get(r)) for r in ranks):
                yield "RL0527", f"node {node} does not have the cells of the group that lists it", tuple(ranks)


def sampled_ranks(p: ReshardPlan, src: MeshCells, dst: MeshCells) -> Sequence[int]:
    """The ranks that are looked at: all, or those of the first and last node of a group at each place in its trees, and
    a first, a middle and a last holder of what crosses the network."""
    every = src.cells.keys() | dst.cells.keys()
    if len(every) <= FEW:
        return sorted(every)
    found: set[int] = set()
    for group in p.groups:
        seen: set[object] = set()
        for at, node in enumerate(group.nodes):
            if (where := _tree_position(group, at)) not in seen or node == group.nodes[-1]:
                seen.add(where)
                found.update(range(node * p.devices, (node + 1) * p.devices))
    holders: dict[Cell, list[int]] = defaultdict(list)
    for rank, cell in src.cells.items():
        holders[cell].append(rank)
    for cell in p.senders:
        found.update(holders[cell][i] for i in (0, len(holders[cell]) // 2, -1))
    return sorted(found & every)


def _tree_position(group: NodeGroup, at: int) -> tuple[int, ...]:
    """The place of a node in the trees of its group: whether there are any, how deep it is, how many it serves."""
    if group.num_trees == len(group.nodes):
        return ()
    _, first, count = tree_position(group, at)
    return (count > 1, *(x for tree in TREES for x in (depth(count, tree, at - first),
                                                       len(children(count, tree, at - first)))))
