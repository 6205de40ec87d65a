"""What each rank sends and receives in a resharding, against what every other rank expects.

In: the `ReshardPlan` of a resharding and its two layouts. Out: faults (code, text, ranks). Proved for a rank: of every
box class that it needs and lacks it receives each element once, and nothing of any other class (RL0527); each slice is
in the lists of both ends, in the same step, and its sender holds the class or received the slice in the step before
(RL0533); and a batch of messages that are posted together has at most `MAX_MESSAGES` (RL0535).

Small worlds are checked rank by rank. In large ones `reshard_records.py` proves the records of all node groups and all
cells, and the formulas that make slices of them are checked on a sample of ranks. What they depend on is the shape of a
group (how many nodes and trees), a node's position in its trees, a device, and the place of a cell among the senders;
each that occurs is in the sample. `tests/verify/test_sampled_ranks.py` compares with a check of all ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.box_classes import BoxClass
from rldsl.reshard.broadcast_trees import TREES, children, depth
from rldsl.reshard.in_place import MAX_PARTS
from rldsl.reshard.records import NodeGroup, ReshardPlan, TransferSlice
from rldsl.reshard.reshard_cache import ReshardCache, reshard_cache
from rldsl.reshard.transfer_slices import pair_slices, rank_slices, tree_position
from rldsl.sharding.boxes import Cell
from rldsl.sharding.message_batches import MAX_MESSAGES, message_batches
from rldsl.verify.reshard_records import ClassIndex, Fault, arrived_before, covers_once, record_faults

CHECK_ALL_UP_TO = 64  # ranks; of more, a sample is checked
Item = TypeVar("Item")

PAIRS = 24  # of the peers of a rank of the sample, at most, that are compared with it


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


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices of a rank."""

    sends: Mapping[int, Sequence[TransferSlice]]  # to each peer
    receives: Mapping[int, Sequence[TransferSlice]]  # from each peer
    arriving: Mapping[int, Sequence[TransferSlice]]  # of each box class, what the rank receives

    @staticmethod
    def of(plan: ReshardPlan, rank: int, cache: ReshardCache) -> RankSlices:
        sends, receives, arriving = (defaultdict[int, list[TransferSlice]](list) for _ in range(3))
        out, into = rank_slices(plan, rank, cache)
        for x in out:
            sends[x.peer].append(x)
        for x in into:
            receives[x.peer].append(x)
            arriving[x.box_class].append(x)
        return RankSlices(sends, receives, arriving)


def missing_elements(classes: Sequence[BoxClass], src: MeshCells, dst: MeshCells) -> int:
    """The number of elements that ranks of the destination need and do not hold, over all ranks."""
    index, sizes = ClassIndex(classes), [box_class.size for box_class in classes]
    needed = {cell: sum(sizes[i] for i in numbers) for cell, numbers in index.needed.items()}
    pairs = Counter((src.cells.get(rank), cell) for rank, cell in dst.cells.items())
    kept = {(held, cell): sum(sizes[i] for i in index.held.get(held, set()) & index.needed.get(cell, set()))
            for held, cell in pairs if held is not None}
    return sum(count * (needed.get(cell, 0) - (kept[held, cell] if held is not None else 0))
               for (held, cell), count in pairs.items())


def slice_faults(plan: ReshardPlan, src: MeshCells, dst: MeshCells, world: int) -> Iterator[Fault]:
    """world: the number of all ranks."""
    index = ClassIndex(plan.classes)
    if faults := [*_group_faults(plan, src, dst, index)]:
        yield from faults  # with wrong groups the slices of a rank may not even be defined
        return
    members = src.cells.keys() | dst.cells.keys()
    if len(members) > CHECK_ALL_UP_TO:
        if faults := [*record_faults(plan, src.cells, dst.cells, index)]:
            yield from faults
            return
        yield from rank_faults(plan, src, dst, world, index, sampled_ranks(plan, src, dst), PAIRS)
    else:
        yield from rank_faults(plan, src, dst, world, index, sorted(members))


def rank_faults(plan: ReshardPlan, src: MeshCells, dst: MeshCells, world: int, index: ClassIndex, ranks: Iterable[int],
                pairs: int = 0) -> Iterator[Fault]:
    """What is wrong with the slices of some ranks. pairs: with how many of its peers each is compared at most; 0: with
    all of them."""
    cache, paired = _SliceCache(plan), set[tuple[int, int]]()
    for rank in ranks:
        mine, held = cache.of(rank), src.cells.get(rank)
        yield from _coverage_faults(plan, rank, index.lacking(held, dst.cells.get(rank)), mine.arriving)
        peers = sorted({*mine.sends, *mine.receives})
        for peer in _spread(peers, pairs or len(peers)):
            yield from (_some_pairing_faults if pairs else _pairing_faults)(rank, peer, cache, paired)
        yield from _holding_faults(rank, held, mine, index)
        yield from _batch_faults(rank, mine, world)


def _spread(peers: Sequence[int], count: int) -> Sequence[int]:
    """At most `count` of them: the first, the last, and others at even distances."""
    if len(peers) <= count:
        return peers
    return [peers[i * (len(peers) - 1) // (count - 1)] for i in range(count)]


class _SliceCache:
    """The slices of ranks, each computed when it is first asked for."""

    def __init__(self, plan: ReshardPlan):
        self.plan = plan
        self.by_rank: dict[int, RankSlices] = {}
        self.common = reshard_cache(plan)

    def of(self, rank: int) -> RankSlices:
        if rank not in self.by_rank:
            self.by_rank[rank] = RankSlices.of(self.plan, rank, self.common)
        return self.by_rank[rank]


def _coverage_faults(plan: ReshardPlan, rank: int, lacks: Set[int],
                     arriving: Mapping[int, Sequence[TransferSlice]]) -> Iterator[Fault]:
    """Box classes that a rank lacks and does not receive exactly once, or receives and does not lack."""
    for i in sorted(lacks | arriving.keys()):
        box_class = plan.classes[i]
        if not covers_once(arriving.get(i, ()), box_class.size if i in lacks else 0):
            boxes = ", ".join(f"{e.spec} {e.box}" for e in box_class.segments[:2])
            yield "RL0527", f"rank {rank} does not receive box class {i} ({boxes}) exactly once", (rank,)


def _pairing_faults(rank: int, peer: int, cache: _SliceCache, paired: set[tuple[int, int]]) -> Iterator[Fault]:
    """Whether the ends of a pair of ranks list different slices, or in another order. paired: the (sender, receiver)
    pairs that have been compared."""
    mine, other = cache.of(rank), cache.of(peer)
    for a, b, sends, receives in ((rank, peer, mine, other), (peer, rank, other, mine)):
        if (a, b) not in paired:
            paired.add((a, b))
            if _without_peer(sends.sends.get(b, ())) != _without_peer(receives.receives.get(a, ())):
                yield _unpaired(a, b)


def _some_pairing_faults(rank: int, peer: int, cache: _SliceCache, paired: set[tuple[int, int]]) -> Iterator[Fault]:
    """The same without all other slices of the peer, of which there may be thousands."""
    mine = cache.of(rank)
    for a, b, listed, side in ((rank, peer, mine.sends, 0), (peer, rank, mine.receives, 1)):
        if (a, b) not in paired:
            paired.add((a, b))
            both = pair_slices(cache.plan, a, b, cache.common)
            if _without_peer(both[0]) != _without_peer(both[1]) or both[side] != tuple(listed.get(peer, ())):
                yield _unpaired(a, b)


def _without_peer(slices: Iterable[TransferSlice]) -> list[tuple[int, int, int, int]]:
    return [(step, box_class, start, stop) for step, _, box_class, start, stop in slices]


def _unpaired(sender: int, receiver: int) -> Fault:
    return ("RL0533", f"what rank {sender} sends to rank {receiver} is not what that rank expects", (sender, receiver))


def _holding_faults(rank: int, held: Cell | None, mine: RankSlices, index: ClassIndex) -> Iterator[Fault]:
    """Slices that a rank sends although it neither holds them nor received them in the step before."""
    held_classes = index.held.get(held, set()) if held is not None else set()
    had: set[tuple[int, int, int, int]] = set()  # slices that arrived before: a rank forwards many to several peers
    for peer, slices in mine.sends.items():
        for x in slices:
            if x.box_class in held_classes or (forwarded := (x.step, x.box_class, x.start, x.stop)) in had:
                continue
            if arrived_before(mine.arriving.get(x.box_class, ()), x):
                had.add(forwarded)
            else:
                yield ("RL0533", f"rank {rank} would send rank {peer} a part of box class {x.box_class} that it does "
                       f"not have in step {x.step}", (rank, peer))


def _batch_faults(rank: int, mine: RankSlices, world: int) -> Iterator[Fault]:
    """Batches with too many messages. A round has at most one message to and one from a peer, each in a few parts;
    `sharding/message_batches.py` divides peers into batches, the same at both ends of a pair."""
    for peers in message_batches(rank, {*mine.sends, *mine.receives}, world, MAX_MESSAGES // MAX_PARTS):
        posted = MAX_PARTS * sum((peer in mine.sends) + (peer in mine.receives) for peer in peers)
        if posted > MAX_MESSAGES:
            yield "RL0535", f"rank {rank} posts up to {posted} messages at once, more than {MAX_MESSAGES}", (rank,)


# ------------------------------------------------------------------------------------------------------- groups


def _group_faults(plan: ReshardPlan, src: MeshCells, dst: MeshCells, index: ClassIndex) -> Iterator[Fault]:
    """Nodes in which a rank lacks something and that are not in exactly one group, or whose ranks have other cells than
    the group says."""
    groups_of_node = Counter(node for group in plan.groups for node in group.nodes)
    if twice := [node for node, count in groups_of_node.items() if count > 1]:
        yield "RL0527", f"nodes {twice[:4]} are in several groups", ()
    for rank, cell in dst.cells.items():
        if rank // plan.devices not in groups_of_node and index.lacking(src.cells.get(rank), cell):
            yield "RL0527", f"rank {rank} lacks parameters, and its node is in no group", (rank,)
    for group in plan.groups:
        for node in group.nodes:
            ranks = range(node * plan.devices, (node + 1) * plan.devices)
            if group.cells != tuple((src.cells.get(r), dst.cells.get(r)) for r in ranks):
                yield "RL0527", f"node {node} does not have the cells of the group that lists it", tuple(ranks)


def sampled_ranks(plan: ReshardPlan, src: MeshCells, dst: MeshCells) -> Sequence[int]:
    """The ranks of a large world that are checked. Of the groups that want the same and have equally many nodes and
    trees: the first, the middle one and the last. Of such a group: the last node, and the first at each position in its
    trees; all devices of one node, and of the others the first and the last. Of the cells that send to the same
    families of groups from equally many ranks: the first, the middle one and the last, and of each of these the first,
    the middle and the last holder."""
    alike: dict[Hashable, list[NodeGroup]] = defaultdict(list)
    for group in plan.groups:
        alike[id(group.arrivals.wanted), len(group.nodes), group.num_trees].append(group)
    sample: set[int] = set()
    for groups in alike.values():
        for number, group in enumerate(_ends(groups)):
            positions: dict[tuple[int, ...], int] = {}
            for index, node in enumerate(group.nodes):
                positions.setdefault(_tree_position(group, index), node)
            for i, node in enumerate({*positions.values(), group.nodes[-1]}):
                devices = range(plan.devices) if number == i == 0 else (0, plan.devices - 1)
                sample.update(node * plan.devices + device for device in devices)
    holders: dict[Cell, list[int]] = defaultdict(list)
    for rank, cell in src.cells.items():
        holders[cell].append(rank)
    senders: dict[Hashable, list[Cell]] = defaultdict(list)
    for cell, sender in plan.senders.items():
        families = tuple(family.groups[0] for family, _ in sender.supplies.families)
        senders[families, sender.num_senders].append(cell)
    sample.update(rank for cells in senders.values() for cell in _ends(cells) for rank in _ends(holders[cell]))
    return sorted(sample & (src.cells.keys() | dst.cells.keys()))


def _ends(items: Sequence[Item]) -> Sequence[Item]:
    """The first, the middle one and the last."""
    return [items[i] for i in sorted({0, len(items) // 2, len(items) - 1})]


def _tree_position(group: NodeGroup, index: int) -> tuple[int, ...]:
    """The position of the group's `index`th node in its trees: (whether there are other nodes in them, and for each
    tree the node's depth and number of children). Empty where every node is a separate tree."""
    if group.num_trees == len(group.nodes):
        return ()
    _, first, count = tree_position(group, index)
    return (count > 1, *(x for tree in TREES for x in (depth(count, tree, index - first),
                                                       len(children(count, tree, index - first)))))
