"""Before a save, every parameter is gathered on one rank, its owner, from the ranks that hold the rest of it.

In: tables with sound references. Out: diagnostics RL0527 (an owner does not get its parameters exactly once), RL0533
(what one rank sends is not what the other expects, or it does not hold it) and RL0535 (too many messages at once). The
messages are those of `reshard/gather.py`, which every rank computes. The messages of all ranks are checked where they
have few boxes. Where they have many, which grow with parameters times ranks, two things make up what every owner gets,
and both are checked in full: the division of a parameter, equal for all layers, into boxes of the ranks that hold them;
and for each owner, what it holds of these boxes and so does not receive. The messages made of that are then checked on
some owners and some of the ranks that send to them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rldsl.diag import Diagnostic
from rldsl.plan.events import Save
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec
from rldsl.reshard.gather import division, gather_messages, owners
from rldsl.reshard.rounds import Message
from rldsl.sharding.boxes import (
    Box,
    Cell,
    Parameter,
    contains,
    geometry,
    parameters,
    pieces_at,
    pieces_by_pair,
    stages,
    volume,
)
from rldsl.sharding.message_batches import MAX_MESSAGES, message_batches
from rldsl.verify.box_classes import overlapping
from rldsl.verify.reshard_records import Fault
from rldsl.verify.tables import Tables, name, problem
from rldsl.verify.transfer_slices import MeshCells

CHECK_ALL_UP_TO = 1 << 15  # boxes in the messages of a save; of more, a sample of the messages is checked

Item = TypeVar("Item")
Division = Sequence[tuple[int, int, Box]]  # (part, zero shard, box)es
Messages = tuple[Sequence[Message], Sequence[Message]]  # what a rank sends, what it receives


def check_saves(t: Tables) -> Iterator[Diagnostic]:
    examined: dict[tuple[str, str], Sequence[Fault]] = {}
    for e, _ in t.events:
        if isinstance(e, Save):
            if (key := (e.model, e.layout)) not in examined:
                layout = t.layouts[e.layout]
                examined[key] = examine_save(t.models[e.model], layout, t.meshes[layout.mesh], t.plan.header.world)
            for code, what, ranks in examined[key]:
                yield problem(code, f"{name(e)}: {what}", e, ranks=ranks)


def examine_save(model: Model, layout: Layout, mesh: Mesh, world: int) -> Sequence[Fault]:
    """What is wrong with the messages of a save. world: number of ranks of the run."""
    return tuple(_faults(model, layout, mesh, world))


def _faults(model: Model, layout: Layout, mesh: Mesh, world: int) -> Iterator[Fault]:
    held = _HeldBoxes(model, layout, MeshCells.of(layout, mesh).cells)
    owner = owners(model, layout, mesh)
    if model.lora:  # adapters go into one file
        owner = dict.fromkeys(owner, mesh.members()[0])
    divided = {spec.name: division(spec, layout) for spec in model.params}
    boxes = sum(len(divided[p.spec.name]) for p in parameters(model))
    if boxes <= CHECK_ALL_UP_TO:
        yield from _message_faults(model, held, owner, gather_messages(model, layout, mesh, owner, tuple(held.cells)),
                                   world, complete=True)
        return
    if faults := [*_division_faults(model, layout, divided), *_owner_faults(model, held, owner, divided)]:
        yield from faults
        return
    ranks = {*_ends(sorted({*owner.values()})), *_ends([*held.cells])}
    messages = gather_messages(model, layout, mesh, owner, tuple(ranks))
    peers = {message.peer for both in messages.values() for one_way in both for message in _ends(one_way)} - ranks
    messages |= gather_messages(model, layout, mesh, owner, tuple(sorted(peers)))
    yield from _message_faults(model, held, owner, messages, world, complete=False)


def _message_faults(model: Model, held: _HeldBoxes, owner: Mapping[str, int], messages: Mapping[int, Messages],
                    world: int, complete: bool) -> Iterator[Fault]:
    """complete: whether `messages` has all ranks."""
    yield from _incomplete(model, held, owner, messages, complete)
    yield from _not_held(model, held, messages)
    yield from _unmatched(messages, complete)
    yield from _unbounded(messages, world)


def _ends(items: Sequence[Item]) -> Sequence[Item]:
    """The first, the middle one and the last."""
    return [items[i] for i in sorted({0, len(items) // 2, len(items) - 1})] if items else ()


def _division_faults(model: Model, layout: Layout, divided: Mapping[str, Division]) -> Iterator[Fault]:
    """Parameters whose boxes are not a division of them, or not where the records place them."""
    right: set[tuple[object, int]] = set()  # geometry and id of the division, of parameters that are right
    for spec in model.params:
        if (key := (geometry(spec), id(divided[spec.name]))) in right:
            continue
        right.add(key)
        boxes = [box for _, _, box in divided[spec.name]]
        if sum(map(volume, boxes)) != _size(spec) or overlapping(boxes):
            right.discard(key)
            yield "RL0527", f"the boxes of {spec.name} are not all of it, once each", ()
        pieces = pieces_by_pair(spec, layout)
        for part, zero_shard, box in divided[spec.name]:
            if not any(contains(piece.box, box) for piece in pieces.get((part, zero_shard), ())):
                right.discard(key)
                yield "RL0533", f"the ranks at part {part}.{zero_shard} do not hold {spec.name} {box}", ()


def _owner_faults(model: Model, held: _HeldBoxes, owner: Mapping[str, int],
                  divided: Mapping[str, Division]) -> Iterator[Fault]:
    """Parameters of which an owner holds other than the boxes that are not sent to it: those of its zero shard that
    lie in its pieces."""
    by_shard: dict[tuple[str, int], list[Box]] = defaultdict(list)
    for spec, boxes in divided.items():
        for _, zero_shard, box in boxes:
            by_shard[spec, zero_shard].append(box)
    tested: dict[tuple[str, tuple[Box, ...], int], bool] = {}
    for p in parameters(model):
        rank = owner.get(p.name, -1)
        if rank not in held.cells:
            yield "RL0527", f"{p.name} has no owner on the mesh", ()
            continue
        own, zero_shard = held.of(p, rank), held.cells[rank].zero_shard
        if (key := (p.spec.name, own, zero_shard)) not in tested:
            kept = [box for box in by_shard[p.spec.name, zero_shard] if any(contains(piece, box) for piece in own)]
            tested[key] = sum(map(volume, kept)) == sum(map(volume, own))
        if not tested[key]:
            yield "RL0527", f"{p.name} is not complete on rank {rank}", (rank,)


def _size(spec: ParamSpec) -> int:
    return volume(tuple((0, n) for n in spec.shape))


class _HeldBoxes:
    """The boxes of each parameter that each rank holds."""

    def __init__(self, model: Model, layout: Layout, cells: Mapping[int, Cell]):
        self.layout, self.cells = layout, cells
        self.stages = {p.name: stages(p, model.layers, layout) for p in parameters(model)}
        self.cache: dict[tuple[str, int, int], tuple[Box, ...]] = {}

    def of(self, p: Parameter, rank: int) -> tuple[Box, ...]:
        at = self.cells[rank]
        if at.pp_rank not in self.stages[p.name]:
            return ()
        key = (p.spec.name, at.part, at.zero_shard)
        if key not in self.cache:
            self.cache[key] = tuple(piece.box for piece in pieces_at(p.spec, self.layout, at.part, at.zero_shard))
        return self.cache[key]


def _incomplete(model: Model, held: _HeldBoxes, owner: Mapping[str, int],
                messages: Mapping[int, Messages], complete: bool) -> Iterator[Fault]:
    """Parameters that are not complete on their owner, and what another rank receives. complete: see
    `_message_faults`."""
    received: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for rank, (_, receives) in messages.items():
        for message in receives:
            for parameter, box in message.boxes:
                received[rank, parameter].append(box)
    tested: dict[tuple[str, tuple[Box, ...]], bool] = {}
    for p in parameters(model):
        rank = owner.get(p.name, -1)
        if rank not in held.cells:
            yield "RL0527", f"{p.name} has no owner on the mesh", ()
            continue
        if rank not in messages and not complete:
            continue
        boxes = (*held.of(p, rank), *received.pop((rank, p.name), ()))
        if (key := (p.spec.name, boxes)) not in tested:
            tested[key] = sum(map(volume, boxes)) == _size(p.spec) and not overlapping(boxes)
        if not tested[key]:
            yield "RL0527", f"{p.name} is not complete on rank {rank}", (rank,)
    for rank, parameter in received:
        yield "RL0527", f"rank {rank} receives {parameter}, which it does not write", (rank,)


def _not_held(model: Model, held: _HeldBoxes, messages: Mapping[int, Messages]) -> Iterator[Fault]:
    """Boxes that a rank sends and does not hold."""
    by_name = {p.name: p for p in parameters(model)}
    for rank, (sends, _) in messages.items():
        for message in sends:
            for parameter, box in message.boxes:
                own_boxes = held.of(by_name[parameter], rank)
                if box not in own_boxes and not any(contains(own, box) for own in own_boxes):
                    yield "RL0533", f"rank {rank} would send {parameter} {box}, which it does not hold", (rank,)


def _unmatched(messages: Mapping[int, Messages], complete: bool) -> Iterator[Fault]:
    """Pairs of ranks with several messages from one to the other, or whose ends do not agree on the boxes. complete:
    see `_message_faults`; else pairs of which one rank is missing are left out."""
    sent, expected = ({rank: {message.peer: message.boxes for message in both[direction]}
                       for rank, both in messages.items()} for direction in (0, 1))
    for rank, (sends, receives) in messages.items():
        if len(sent[rank]) < len(sends) or len(expected[rank]) < len(receives):
            yield "RL0533", f"rank {rank} has several messages to or from the same rank", (rank,)
        for peer, boxes in sent[rank].items():
            if (complete or peer in expected) and expected.get(peer, {}).get(rank) != boxes:
                yield "RL0533", f"what rank {rank} sends to rank {peer} is not what that rank expects", (rank, peer)
        for peer in expected[rank]:
            if (complete or peer in sent) and rank not in sent.get(peer, {}):
                yield "RL0533", f"rank {rank} waits for rank {peer}, which does not send to it", (peer, rank)


def _unbounded(messages: Mapping[int, Messages], world: int) -> Iterator[Fault]:
    """Ranks that post too many messages at once; `sharding/message_batches.py` divides peers into batches, the same at
    both ends of a pair."""
    for rank, both in messages.items():
        count = Counter(message.peer for one_way in both for message in one_way)
        for peers in message_batches(rank, count, world):
            if (posted := sum(count[peer] for peer in peers)) > MAX_MESSAGES:
                yield "RL0535", f"rank {rank} posts {posted} messages at once, more than {MAX_MESSAGES}", (rank,)
