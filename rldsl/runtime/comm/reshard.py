"""Parameters between ranks: the rounds of a reallocation as one rank takes part in it.

In: a `Route`, worked out once, and the local tensors under both layouts. Out: a `Pending` for the last rounds.

Every rank goes through all rounds in order, two of them under way at a time: at most a bucket that it sends and one
that it receives. A rank waits in a round only for ranks that are in the same round or in an earlier one, or at an
earlier event, so the order of the plan is enough against deadlock. What has to be passed on is taken from the messages
of two rounds before, so that it is the same whether the destination keeps it or a mean of it and something older.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rldsl.plan.model import Layout, Mesh, Model
from rldsl.reshard.in_place import MAX_PARTS, Held, buffer_elements, is_contiguous, pieces_by_parameter, split_message
from rldsl.reshard.rounds import BUCKET, ROUNDS_IN_FLIGHT, Message, Round, kept_boxes, num_buckets, rank_rounds
from rldsl.reshard.routes import plan_routes
from rldsl.runtime.comm.exchange import PostedMessages, post_each
from rldsl.runtime.store import Pending
from rldsl.sharding.boxes import Box, cell_of, contains, intersect, itemsize, local_slice, slices_within, volume

Tensors = Mapping[str, torch.Tensor]  # the local ones of a shard, by parameter
LocalBox = tuple[str, tuple[slice, ...]]  # a box of a parameter: where it lies in its local tensor
Arrived = dict[str, list[tuple[Box, torch.Tensor]]]  # parameter -> what came of it in a round


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A message, or a part of one that goes by itself. spots: of its boxes; None where this rank does not hold one, and
    passes it on. stretch: all its elements lie together, in the first of them."""

    message: Message
    size: int
    spots: tuple[LocalBox | None, ...]
    stretch: bool


PlacedPart = tuple[MessagePart, torch.Tensor, bool]  # with its elements; whether they lie in the parameters themselves


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends and receives, round by round, and (from, to) of what it has already. parts: (sends,
    receives) of each round. relays: whether it passes on what came to it."""

    rounds: Sequence[Round]
    parts: Sequence[tuple[tuple[MessagePart, ...], tuple[MessagePart, ...]]]
    copies: Sequence[tuple[LocalBox, LocalBox]]
    relays: bool

    @staticmethod
    def of(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh, devices_per_node: int, rank: int,
           bucket: int = BUCKET) -> Route:
        """model: in the dtype that travels. bucket: bytes."""
        way = plan_routes(model, src, src_mesh, dst, dst_mesh, devices_per_node)
        rounds = rank_rounds(way, rank, num_buckets(way, itemsize(model), bucket))
        have, want = (pieces_by_parameter(model, at, cell_of(at, mesh, rank))
                      for at, mesh in ((src, src_mesh), (dst, dst_mesh)))
        parts = tuple((_message_parts(r.sends, have), _message_parts(r.receives, want)) for r in rounds)
        kept = tuple((local_box(have, *box), local_box(want, *box)) for box in kept_boxes(way, rank))
        return Route(rounds, parts, kept, any(x is None for sends, _ in parts for part in sends for x in part.spots))


def local_box(held: Held, name: str, box: Box) -> LocalBox:
    """Where a box lies that this rank holds."""
    parameter, pieces = held[name]
    piece = next(p for p in pieces if contains(p.box, box))
    return name, local_slice(piece, box, parameter.dim)


def _message_parts(messages: Sequence[Message], held: Held) -> tuple[MessagePart, ...]:
    def spots(message: Message) -> tuple[LocalBox | None, ...]:
        return tuple(local_box(held, *x) if any(contains(p.box, x[1]) for p in held[x[0]][1]) else None
                     for x in message.boxes)

    return tuple(MessagePart(m, m.size(), spots(m), is_contiguous(m, held))
                 for whole in messages for m in split_message(whole))


@torch.no_grad()
def realloc(route: Route, src: Tensors | None, dst: Tensors | None, dtype: torch.dtype, device: torch.device,
            tag: int, decay: float = 0.0) -> Pending:
    """Parameters along a route. The source may change when the last rounds have been waited for. decay: of what was
    there before, in a mean with what comes; one element's arithmetic is the same wherever it lies."""
    def put(to: LocalBox | None, value: torch.Tensor) -> None:
        assert dst is not None and to is not None, "a rank received data that it does not expect"
        target = dst[to[0]][to[1]]
        target.copy_(target.float() * decay + value.float() * (1 - decay) if decay else value)

    for (name, at), to in route.copies:
        assert src is not None
        put(to, src[name][at])
    sends, receives = ([[(p, _in_place_view(p, held, dtype)) for p in sides[side]] for sides in route.parts]
                       for side, held in enumerate((src, None if decay else dst)))
    out, into = ([torch.empty(n, dtype=dtype, device=device) for n in buffer_elements(
        [sum(p.size for p, there in each if there is None) for each in side])] for side in (sends, receives))
    under_way: deque[Callable[[], Arrived]] = deque()
    for number in range(len(route.parts)):
        came = under_way.popleft()() if len(under_way) == ROUNDS_IN_FLIGHT else {}
        going = _place_parts(sends[number], out[number % ROUNDS_IN_FLIGHT])
        for part, flat, in_place in going:
            if not in_place:
                _pack(part, flat, src, came)
        coming = _place_parts(receives[number], into[number % ROUNDS_IN_FLIGHT])
        send, receive = ([(p.message.peer, flat) for p, flat, _ in side] for side in (going, coming))
        posted = post_each(send, receive, tag=tag, max_per_peer=MAX_PARTS)
        under_way.append(partial(_arrive, posted, coming, put, route.relays))

    def finish() -> None:
        while under_way:
            under_way.popleft()()

    return Pending(finish)


def _in_place_view(part: MessagePart, tensors: Tensors | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The elements of a part, where they lie in one stretch of a parameter."""
    if tensors is None or not part.stretch or part.spots[0] is None:
        return None
    name, at = part.spots[0]
    view = tensors[name][at]
    return view.view(-1) if view.dtype == dtype and view.is_contiguous() else None


def _place_parts(parts: Sequence[tuple[MessagePart, torch.Tensor | None]], room: torch.Tensor) -> list[PlacedPart]:
    """The parts of a round; what does not lie in a parameter, one after the other in `room`."""
    found, at = [], 0
    for part, there in parts:
        found.append((part, room[at : at + part.size] if there is None else there, there is not None))
        at += part.size if there is None else 0
    return found


def _pack(part: MessagePart, out: torch.Tensor, src: Tensors | None, came: Arrived) -> None:
    """Boxes that this rank holds, and boxes that came two rounds before."""
    for spot, name, box, view in _views(part, out):
        if src is not None and spot is not None:
            view.copy_(src[spot[0]][spot[1]])
            continue
        for there, value in came[name]:
            if (both := intersect(there, box)) is not None:
                view[slices_within(both, box)] = value[slices_within(both, there)]


@torch.no_grad()
def _arrive(posted: PostedMessages, receives: Sequence[PlacedPart],
            put: Callable[[LocalBox | None, torch.Tensor], None], keep: bool) -> Arrived:
    """Wait for a round. keep: what came is passed on."""
    posted.wait()
    found: Arrived = {}
    for part, flat, in_place in receives:
        for spot, name, box, value in _views(part, flat) if keep or not in_place else ():
            if not in_place:
                put(spot, value)
            if keep:
                found.setdefault(name, []).append((box, value))
    return found


def _views(part: MessagePart, flat: torch.Tensor) -> Iterator[tuple[LocalBox | None, str, Box, torch.Tensor]]:
    """Each box of a part with its elements."""
    at = 0
    for spot, (name, box) in zip(part.spots, part.message.boxes, strict=True):
        yield spot, name, box, flat[at : (at := at + volume(box))].view([stop - start for start, stop in box])
