"""Before a save, every parameter becomes whole on one rank, from ranks that hold the rest of it.

In: tables with sound references. Out: diagnostics RL0527 (an owner does not get its parameters exactly once), RL0533
(what one rank sends is not what the other expects, or it does not hold it) and RL0535 (too many messages at once). The
messages are those of `reshard/gather.py`, which every rank computes. All ranks are checked; what ranks in equal
positions hold of equal layers is computed once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Save
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.gather import gather_messages, owners
from rldsl.reshard.rounds import Message
from rldsl.sharding.boxes import Box, Cell, Parameter, contains, parameters, pieces_at, stages, volume
from rldsl.sharding.message_batches import MAX_MESSAGES, message_batches
from rldsl.verify.box_classes import overlapping
from rldsl.verify.tables import Tables, name, problem
from rldsl.verify.transfer_slices import Fault, MeshCells

Messages = tuple[Sequence[Message], Sequence[Message]]  # what a rank sends, what it receives


def check_saves(t: Tables) -> Iterator[Diagnostic]:
    known: dict[tuple[str, str], Sequence[Fault]] = {}
    for e, _ in t.events:
        if isinstance(e, Save):
            if (e.model, e.layout) not in known:
                x = t.layouts[e.layout]
                known[e.model, e.layout] = examine_save(t.models[e.model], x, t.meshes[x.mesh], t.plan.header.world)
            for code, what, ranks in known[e.model, e.layout]:
                yield problem(code, f"{name(e)}: {what}", e, ranks=ranks)


def examine_save(m: Model, x: Layout, mesh: Mesh, world: int) -> Sequence[Fault]:
    """What is wrong with the messages of a save. world: number of ranks of the run."""
    return tuple(_faults(m, x, mesh, world))


def _faults(m: Model, x: Layout, mesh: Mesh, world: int) -> Iterator[Fault]:
    held = _Held(m, x, MeshCells.of(x, mesh).cells)
    owner = owners(m, x, mesh)
    if m.lora:  # adapters go into one file
        owner = dict.fromkeys(owner, mesh.members()[0])
    known = gather_messages(m, x, mesh, owner, tuple(held.cells))
    yield from _whole(m, held, owner, known)
    yield from _sent(m, held, known)
    yield from _matched(known)
    yield from _bounded(known, world)


class _Held:
    """The boxes of a parameter on a rank. cells: where each rank stands."""

    def __init__(self, m: Model, x: Layout, cells: Mapping[int, Cell]):
        self.m, self.x, self.cells = m, x, cells
        self.stages = {p.name: stages(p, m.layers, x) for p in parameters(m)}
        self.known: dict[tuple[str, int, int], tuple[Box, ...]] = {}

    def of(self, p: Parameter, rank: int) -> tuple[Box, ...]:
        at = self.cells[rank]
        if at.pp_rank not in self.stages[p.name]:
            return ()
        key = (p.spec.name, at.part, at.zero_shard)
        if key not in self.known:
            self.known[key] = tuple(piece.box for piece in pieces_at(p.spec, self.x, at.part, at.zero_shard))
        return self.known[key]


def _whole(m: Model, held: _Held, owner: Mapping[str, int], known: Mapping[int, Messages]) -> Iterator[Fault]:
    """Each parameter is all there on its owner, and nothing comes to anybody else."""
    got: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for rank, (_, receives) in known.items():
        for message in receives:
            for name_, box in message.boxes:
                got[rank, name_].append(box)
    tested: dict[tuple[str, tuple[Box, ...]], bool] = {}
    for p in parameters(m):
        rank = owner.get(p.name, -1)
        if rank not in held.cells:
            yield "RL0527", f"{p.name} has no owner on the mesh", ()
            continue
        boxes = (*held.of(p, rank), *got.pop((rank, p.name), ()))
        if (key := (p.spec.name, boxes)) not in tested:
            whole = volume(tuple((0, n) for n in p.spec.shape))
            tested[key] = sum(map(volume, boxes)) == whole and not overlapping(boxes)
        if not tested[key]:
            yield "RL0527", f"{p.name} is not complete on rank {rank}", (rank,)
    for rank, name_ in got:
        yield "RL0527", f"rank {rank} receives {name_}, which it does not write", (rank,)


def _sent(m: Model, held: _Held, known: Mapping[int, Messages]) -> Iterator[Fault]:
    """Who sends a box holds it."""
    by_name = {p.name: p for p in parameters(m)}
    for rank, (sends, _) in known.items():
        for message in sends:
            for name_, box in message.boxes:
                mine = held.of(by_name[name_], rank)
                if box not in mine and not any(contains(h, box) for h in mine):
                    yield "RL0533", f"rank {rank} would send {name_} {box}, which it does not hold", (rank,)


def _matched(known: Mapping[int, Messages]) -> Iterator[Fault]:
    """From each rank to each other there is one message or none, and both ends agree on its boxes."""
    given, taken = ({rank: {message.peer: message.boxes for message in both[side]} for rank, both in known.items()}
                    for side in (0, 1))
    for rank, (sends, receives) in known.items():
        if len(given[rank]) < len(sends) or len(taken[rank]) < len(receives):
            yield "RL0533", f"rank {rank} has several messages to or from the same rank", (rank,)
        for peer, boxes in given[rank].items():
            if taken.get(peer, {}).get(rank) != boxes:
                yield "RL0533", f"what rank {rank} sends to rank {peer} is not what that rank expects", (rank, peer)
        for peer in taken[rank]:
            if rank not in given.get(peer, {}):
                yield "RL0533", f"rank {rank} waits for rank {peer}, which does not send to it", (peer, rank)


def _bounded(known: Mapping[int, Messages], world: int) -> Iterator[Fault]:
    """They are posted by the rule of `sharding/message_batches.py`: a pair is in one batch at both ends."""
    for rank, both in known.items():
        count = Counter(message.peer for side in both for message in side)
        for peers in message_batches(rank, count, world):
            if (posted := sum(count[peer] for peer in peers)) > MAX_MESSAGES:
                yield "RL0535", f"rank {rank} posts {posted} messages at once, more than {MAX_MESSAGES}", (rank,)
