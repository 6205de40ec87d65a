"""What each rank sends and receives in a reallocation, against what every other rank expects.

In: the `Paths` of a reallocation and its two layouts. Out: what is wrong: code, words, ranks. Shown here, for a rank:
of every line that it wants and does not hold it receives each element once, and of no other line any (RL0527); each
stretch is in the list of both ends, in the same step, and who sends it holds the line or received the stretch in the
step before (RL0533); and the batches in which the messages of a round are posted are of at most `MESSAGES` (RL0535).

All ranks are looked at where they are few. Of many, those of some nodes of each kind, and those with which they
exchange: what a rank does depends on its kind of node, its device and its place in a tree or among the holders, by
formulas whose every case occurs in the nodes that are looked at (`tests/verify/test_lanes.py` holds that against all
ranks). That every node is of the kind that it is said to be is looked at for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.broadcast_trees import TREES, children, depth
from rldsl.reshard.in_place import PARTS
from rldsl.reshard.records import Kind, Paths
from rldsl.reshard.shard_classes import Line
from rldsl.reshard.transfer_slices import Known, Lane, place, rank_lanes
from rldsl.sharding.boxes import Cell
from rldsl.sharding.message_batches import MESSAGES, batches

FEW = 64  # ranks that are all looked at

Fault = tuple[str, str, tuple[int, ...]]  # code, what is wrong, ranks


@dataclass(frozen=True, slots=True)
class Side:
    """A layout on its mesh. cells: where each rank stands, derived here once more."""

    cells: Mapping[int, Cell]

    @staticmethod
    def of(x: Layout, mesh: Mesh) -> Side:
        stage, part = x.dp * x.cp * x.tp, x.ep * x.tp
        shard = x.cp * part
        return Side({r: Cell(i // stage, i % part, i % stage // shard if x.zero else 0)
                     for i, r in enumerate(mesh.members())})


@dataclass(frozen=True, slots=True)
class Ends:
    """The lanes of a rank: to each peer, from each peer, of each line that comes."""

    sends: Mapping[int, Sequence[Lane]]
    receives: Mapping[int, Sequence[Lane]]
    arriving: Mapping[int, Sequence[Lane]]

    @staticmethod
    def of(p: Paths, rank: int, known: Known) -> Ends:
        sends, receives, arriving = defaultdict(list), defaultdict(list), defaultdict(list)
        out, into = rank_lanes(p, rank, known)
        for lane in out:
            sends[lane.peer].append(lane)
        for lane in into:
            receives[lane.peer].append(lane)
            arriving[lane.line].append(lane)
        return Ends(sends, receives, arriving)


def lacking(lines: Sequence[Line], src: Side, dst: Side) -> int:
    """Elements that all ranks of the destination together do not have."""
    pairs = Counter((src.cells.get(rank), cell) for rank, cell in dst.cells.items())
    return sum(count * sum(line.size for line in lines if cell in line.want and held not in line.have)
               for (held, cell), count in pairs.items())


def faults(p: Paths, src: Side, dst: Side, world: int) -> Iterator[Fault]:
    """world: the number of all ranks."""
    if found := [*_kinds(p, src, dst)]:
        yield from found  # otherwise the lanes of a rank may not even be defined
        return
    known = _Ends(p)
    for rank in chosen(p, src, dst):
        yield from _received(p, rank, src.cells.get(rank), dst.cells.get(rank), known.of(rank))
        yield from _matched(p, rank, src.cells.get(rank), known)
        yield from _bounded(rank, known.of(rank), world)


class _Ends:
    """Those of the ranks that were asked for."""

    def __init__(self, p: Paths):
        self.p = p
        self.known: dict[int, Ends] = {}
        self.common = Known(p)

    def of(self, rank: int) -> Ends:
        if rank not in self.known:
            self.known[rank] = Ends.of(self.p, rank, self.common)
        return self.known[rank]


def _received(p: Paths, rank: int, held: Cell | None, cell: Cell | None, mine: Ends) -> Iterator[Fault]:
    for i, line in enumerate(p.lines):
        lacks = cell in line.want and held not in line.have
        if not _whole(mine.arriving.get(i, ()), line.size if lacks else 0):
            what = ", ".join(f"{e.spec} {e.box}" for e in line.entries[:2])
            yield "RL0527", f"rank {rank} does not get line {i} ({what}) exactly once", (rank,)


def _matched(p: Paths, rank: int, held: Cell | None, known: _Ends) -> Iterator[Fault]:
    mine = known.of(rank)
    for peer in sorted({*mine.sends, *mine.receives}):
        other = known.of(peer)
        for a, b, sent, expected in ((rank, peer, mine.sends.get(peer, ()), other.receives.get(rank, ())),
                                     (peer, rank, other.sends.get(rank, ()), mine.receives.get(peer, ()))):
            if [x._replace(peer=0) for x in sent] != [x._replace(peer=0) for x in expected]:
                yield "RL0533", f"what rank {a} sends to rank {b} is not what that one expects", (a, b)
    for peer, lanes in mine.sends.items():
        for lane in lanes:
            if held not in p.lines[lane.line].have and not _came(mine.arriving.get(lane.line, ()), lane):
                yield ("RL0533", f"rank {rank} would send rank {peer} a part of line {lane.line} that it does not have "
                       f"in step {lane.step}", (rank, peer))


def _bounded(rank: int, mine: Ends, world: int) -> Iterator[Fault]:
    """A round has at most one message to and one from a peer, each in a few parts, cut by the rule of
    `sharding/message_batches.py`: a pair is in one batch at both ends."""
    for peers in batches(rank, {*mine.sends, *mine.receives}, world, MESSAGES // PARTS):
        posted = PARTS * sum((peer in mine.sends) + (peer in mine.receives) for peer in peers)
        if posted > MESSAGES:
            yield "RL0535", f"rank {rank} posts up to {posted} messages at once, more than {MESSAGES}", (rank,)


def _whole(lanes: Sequence[Lane], size: int) -> bool:
    """Whether the lanes of a line are [0, size), each element once."""
    at = 0
    for lane in sorted(lanes, key=lambda x: x.start):
        if lane.start != at or lane.stop <= at:
            return False
        at = lane.stop
    return at == size


def _came(arriving: Sequence[Lane], lane: Lane) -> bool:
    """Whether what a lane sends on came in the step before: nothing is kept for longer."""
    at = lane.start
    for x in sorted(arriving, key=lambda x: x.start):
        if x.step == lane.step - 1 and x.start <= at < x.stop:
            at = x.stop
    return at >= lane.stop


# ------------------------------------------------------------------------------------------------------- kinds


def _kinds(p: Paths, src: Side, dst: Side) -> Iterator[Fault]:
    """Every node in which a rank lacks something is of one kind, whose ranks stand as the kind says."""
    of = Counter(node for kind in p.kinds for node in kind.nodes)
    if twice := [node for node, count in of.items() if count > 1]:
        yield "RL0527", f"nodes {twice[:4]} are of several kinds", ()
    lacks: dict[tuple[Cell | None, Cell], bool] = {}
    for rank, cell in dst.cells.items():
        if rank // p.devices not in of:
            key = (src.cells.get(rank), cell)
            if key not in lacks:
                lacks[key] = any(cell in line.want and key[0] not in line.have for line in p.lines)
            if lacks[key]:
                yield "RL0527", f"rank {rank} lacks parameters, and its node is of no kind", (rank,)
    for kind in p.kinds:
        for node in kind.nodes:
            ranks = range(node * p.devices, (node + 1) * p.devices)
            if kind.places != tuple((src.cells.get(r), dst.cells.get(r)) for r in ranks):
                yield "RL0527", f"node {node} is not of the kind that it is said to be", tuple(ranks)


def chosen(p: Paths, src: Side, dst: Side) -> Sequence[int]:
    """The ranks that are looked at: all, or those of the first and last node of a kind at each place in its trees, and
    a first, a middle and a last holder of what crosses the network."""
    every = src.cells.keys() | dst.cells.keys()
    if len(every) <= FEW:
        return sorted(every)
    found: set[int] = set()
    for kind in p.kinds:
        seen: set[object] = set()
        for at, node in enumerate(kind.nodes):
            if (where := _where(kind, at)) not in seen or node == kind.nodes[-1]:
                seen.add(where)
                found.update(range(node * p.devices, (node + 1) * p.devices))
    holders: dict[Cell, list[int]] = defaultdict(list)
    for rank, cell in src.cells.items():
        holders[cell].append(rank)
    for cell in p.sources:
        found.update(holders[cell][i] for i in (0, len(holders[cell]) // 2, -1))
    return sorted(found & every)


def _where(kind: Kind, at: int) -> tuple[int, ...]:
    """The place of a node in the trees of its kind: whether there are any, how deep it is, how many it serves."""
    if kind.trees == len(kind.nodes):
        return ()
    _, first, count = place(kind, at)
    return (count > 1, *(x for tree in TREES for x in (depth(count, tree, at - first),
                                                       len(children(count, tree, at - first)))))
