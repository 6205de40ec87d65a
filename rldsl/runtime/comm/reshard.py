"""Parameters between ranks: the rounds of a reshard (the event `realloc`) as one rank takes part in it.

In: a `RankReshard`, computed once, and the local tensors under both layouts. Out: a `Pending` for the last rounds.

Every rank goes through all rounds in order, with two in flight: at most a bucket that it sends and one that it
receives. A rank waits in a round only for ranks that are in the same round or in an earlier one, or at an earlier
event, so the order of the plan rules out deadlock. What has to be forwarded is taken from the messages of two rounds
before, so it is the same whether the destination keeps it or averages it with older values.

On CUDA all rounds are launched at once on a stream beside the one that computes (`side_stream.py`), so that neither a
rank that packs a round nor one that only sends holds up its own kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rldsl.diag import internal_error, present
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.in_place import MAX_PARTS, Held, buffer_elements, is_contiguous, pieces_by_parameter, split_message
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.rounds import BUCKET, ROUNDS_IN_FLIGHT, Message, Round, kept_boxes, num_buckets, rank_rounds
from rldsl.runtime.comm.exchange import PostedMessages, post_each
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.runtime.store import Pending
from rldsl.sharding.boxes import Box, cell_of, contains, intersect, itemsize, local_slice, slices_within, volume

Tensors = Mapping[str, torch.Tensor]  # the local ones of a shard, by parameter
LocalBox = tuple[str, tuple[slice, ...]]  # a box of a parameter: where it lies in its local tensor
Arrived = dict[str, list[tuple[Box, torch.Tensor]]]  # parameter -> its boxes of a round, with elements


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A message, or a part of one that travels separately."""

    message: Message                          # what is sent, and from or to which rank
    size: int                                 # elements
    local_boxes: tuple[LocalBox | None, ...]  # of the boxes; None if this rank does not hold the box, but forwards it
    is_contiguous: bool                       # all elements are contiguous in the parameter of the first box


PartWithTensor = tuple[MessagePart, torch.Tensor, bool]  # (part, elements, whether they are in the parameter itself)


@dataclass(frozen=True, slots=True)
class RankReshard:
    """What one rank does in a reshard; `ReshardPlan` says it for all ranks."""

    rounds: Sequence[Round]  # what this rank sends and receives in each round
    parts: Sequence[tuple[tuple[MessagePart, ...], tuple[MessagePart, ...]]]  # (sends, receives) of each round
    copies: Sequence[tuple[LocalBox, LocalBox]]  # (from, to) of what this rank has already
    forwards: bool  # whether this rank sends on what it received

    @staticmethod
    def plan(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh, devices_per_node: int, rank: int,
           bucket: int = BUCKET) -> RankReshard:
        """The part of a rank. model: in the dtype that travels. bucket: bytes."""
        plan = plan_reshard(model, src, src_mesh, dst, dst_mesh, devices_per_node)
        rounds = rank_rounds(plan, rank, num_buckets(plan, itemsize(model), bucket))
        have, want = (pieces_by_parameter(model, at, cell_of(at, mesh, rank))
                      for at, mesh in ((src, src_mesh), (dst, dst_mesh)))
        parts = tuple((_message_parts(r.sends, have), _message_parts(r.receives, want)) for r in rounds)
        copies = tuple((local_box(have, *box), local_box(want, *box)) for box in kept_boxes(plan, rank))
        return RankReshard(rounds, parts, copies,
                           any(x is None for sends, _ in parts for part in sends for x in part.local_boxes))


def local_box(held: Held, name: str, box: Box) -> LocalBox:
    """Where a box that this rank holds is in its local tensor."""
    parameter, pieces = held[name]
    piece = next(p for p in pieces if contains(p.box, box))
    return name, local_slice(piece, box, parameter.dim)


def _message_parts(messages: Sequence[Message], held: Held) -> tuple[MessagePart, ...]:
    def local_boxes(message: Message) -> tuple[LocalBox | None, ...]:
        return tuple(local_box(held, *x) if any(contains(p.box, x[1]) for p in held[x[0]][1]) else None
                     for x in message.boxes)

    return tuple(MessagePart(part, part.size(), local_boxes(part), is_contiguous(part, held))
                 for message in messages for part in split_message(message))


@torch.no_grad()
def reshard(todo: RankReshard, src: Tensors | None, dst: Tensors | None, dtype: torch.dtype, side: SideStream,
            tag: int, decay: float = 0.0) -> Pending:
    """Copy parameters from `src` to `dst`, on all ranks of both. The source may change once the result has been waited
    for. decay: if not 0, the destination becomes decay * old + (1 - decay) * new; the arithmetic of an element does not
    depend on the layouts."""
    in_flight: deque[Callable[[], Arrived]] = deque()

    def drain() -> None:
        while in_flight:
            in_flight.popleft()()

    with side.entered():
        _post_rounds(todo, src, dst, dtype, side.device, tag, decay, in_flight)
        if side.stream is not None:  # no host waits there, and the buffers go back to the stream's memory
            drain()
    joined = side.mark()
    kept = [src, dst]  # memory that a stream still reads and writes may not be reused

    def finish() -> None:
        drain()
        joined()
        kept.clear()

    return Pending(finish)


def _post_rounds(todo: RankReshard, src: Tensors | None, dst: Tensors | None, dtype: torch.dtype, device: torch.device,
                 tag: int, decay: float, in_flight: deque[Callable[[], Arrived]]) -> None:
    """Post all rounds. in_flight: gets what waits for the last ones."""
    def put(to: LocalBox | None, value: torch.Tensor) -> None:
        if dst is None or to is None:
            raise internal_error("a rank received data that it does not expect", "run")
        target = dst[to[0]][to[1]]
        target.copy_(target.float() * decay + value.float() * (1 - decay) if decay else value)

    for (name, at), to in todo.copies:
        put(to, present(src, "source on a rank that copies from it", "run")[name][at])
    sends, receives = ([[(p, _in_place_view(p, held, dtype)) for p in sides[side]] for sides in todo.parts]
                       for side, held in enumerate((src, None if decay else dst)))
    out, into = ([torch.empty(n, dtype=dtype, device=device) for n in buffer_elements(
        [sum(p.size for p, view in each if view is None) for each in side])] for side in (sends, receives))
    for number in range(len(todo.parts)):
        arrived = in_flight.popleft()() if len(in_flight) == ROUNDS_IN_FLIGHT else {}
        going = _with_tensors(sends[number], out[number % ROUNDS_IN_FLIGHT])
        for part, flat, in_place in going:
            if not in_place:
                _pack(part, flat, src, arrived)
        coming = _with_tensors(receives[number], into[number % ROUNDS_IN_FLIGHT])
        send, receive = ([(p.message.peer, flat) for p, flat, _ in side] for side in (going, coming))
        posted = post_each(send, receive, tag=tag, max_per_peer=MAX_PARTS)
        in_flight.append(partial(_arrive, posted, coming, put, todo.forwards))


def _in_place_view(part: MessagePart, tensors: Tensors | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The elements of a part if they are contiguous in a parameter, else None: then they are packed in a buffer."""
    if tensors is None or not part.is_contiguous or part.local_boxes[0] is None:
        return None
    name, at = part.local_boxes[0]
    view = tensors[name][at]
    return view.view(-1) if view.dtype == dtype and view.is_contiguous() else None


def _with_tensors(parts: Sequence[tuple[MessagePart, torch.Tensor | None]],
                  buffer: torch.Tensor) -> list[PartWithTensor]:
    """The parts of a round with their elements: those that are not in a parameter, one after another in `buffer`."""
    result, offset = [], 0
    for part, view in parts:
        result.append((part, buffer[offset : offset + part.size] if view is None else view, view is not None))
        offset += part.size if view is None else 0
    return result


def _pack(part: MessagePart, out: torch.Tensor, src: Tensors | None, arrived: Arrived) -> None:
    """Fill `out` with a part: boxes that this rank holds, and boxes that arrived two rounds before."""
    for local, name, box, view in _views(part, out):
        if src is not None and local is not None:
            view.copy_(src[local[0]][local[1]])
            continue
        for arrived_box, value in arrived[name]:
            if (both := intersect(arrived_box, box)) is not None:
                view[slices_within(both, box)] = value[slices_within(both, arrived_box)]


@torch.no_grad()
def _arrive(posted: PostedMessages, receives: Sequence[PartWithTensor],
            put: Callable[[LocalBox | None, torch.Tensor], None], forward: bool) -> Arrived:
    """Wait for a round and unpack it. forward: also return what arrived, since this rank sends it on."""
    posted.wait()
    arrived: Arrived = {}
    for part, flat, in_place in receives:
        for local, name, box, value in _views(part, flat) if forward or not in_place else ():
            if not in_place:
                put(local, value)
            if forward:
                arrived.setdefault(name, []).append((box, value))
    return arrived


def _views(part: MessagePart, flat: torch.Tensor) -> Iterator[tuple[LocalBox | None, str, Box, torch.Tensor]]:
    """Each box of a part with its elements."""
    at = 0
    for local, (name, box) in zip(part.local_boxes, part.message.boxes, strict=True):
        yield local, name, box, flat[at : (at := at + volume(box))].view([stop - start for start, stop in box])
