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

from rldsl.plan.boxes import Box, cell, contains, inside, intersect, itemsize, local_slice, volume
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.realloc.direct import Held, divided, held_at, room
from rldsl.plan.realloc.paths import paths
from rldsl.plan.realloc.rounds import AHEAD, BUCKET, Message, Round, buckets, kept, rank_ops
from rldsl.runtime.exchange import Post, post_each
from rldsl.runtime.store import Pending

Part = tuple[Message, torch.Tensor, bool]  # with its elements; whether they lie in the parameters themselves
Arrived = dict[str, list[tuple[Box, torch.Tensor]]]  # parameter -> what came of it in a round


@dataclass(frozen=True, slots=True)
class Place:
    """Where the boxes of parameters lie in this rank's local tensors under one layout."""

    held: Held
    tensors: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: Model, layout: Layout, mesh: Mesh, rank: int, tensors: Mapping[str, torch.Tensor]) -> Place:
        return Place(held_at(model, layout, cell(layout, mesh, rank)), tensors)

    def has(self, name: str, box: Box) -> bool:
        return any(contains(p.box, box) for p in self.held[name][1])

    def view(self, name: str, box: Box) -> torch.Tensor:
        parameter, pieces = self.held[name]
        piece = next(p for p in pieces if contains(p.box, box))
        return self.tensors[name][local_slice(piece, box, parameter.dim)]


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends and receives, round by round, and what it has already."""

    rounds: Sequence[Round]
    copies: Sequence[tuple[str, Box]]

    @staticmethod
    def of(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh, devices_per_node: int, rank: int,
           bucket: int = BUCKET) -> Route:
        """model: in the dtype that travels. bucket: bytes."""
        way = paths(model, src, src_mesh, dst, dst_mesh, devices_per_node)
        return Route(rank_ops(way, rank, buckets(way, itemsize(model), bucket)),
                     kept(way, rank))


@torch.no_grad()
def realloc(route: Route, src: Place | None, dst: Place | None, dtype: torch.dtype, device: torch.device,
            tag: int, decay: float = 0.0) -> Pending:
    """Parameters along a route. decay: of what was there before, in a mean with what comes; one element's arithmetic is
    the same wherever it lies."""
    def put(name: str, box: Box, value: torch.Tensor) -> None:
        assert dst is not None, f"{name} came to a rank that is not in the destination"
        target = dst.view(name, box)
        target.copy_(target.float() * decay + value.float() * (1 - decay) if decay else value)

    for name, box in route.copies:
        assert src is not None
        put(name, box, src.view(name, box))
    given = None if decay else dst
    sizes = room(enumerate(route.rounds), len(route.rounds),
                 *(lambda m, side=side: _in_place(m, side, dtype) is not None for side in (src, given)))
    out, into = ([torch.empty(n, dtype=dtype, device=device) for n in each] for each in sizes)
    under_way: deque[Callable[[], Arrived]] = deque()
    for number, ops in enumerate(route.rounds):
        came = under_way.popleft()() if len(under_way) == AHEAD else {}
        # the last rounds are waited for late, and until then the source may change
        lying = src if number < len(route.rounds) - AHEAD else None
        sends = _parts(ops.sends, out[number % AHEAD], lying, dtype)
        for part, flat, in_place in sends:
            if not in_place:
                _pack(part, flat, src, came)
        receives = _parts(ops.receives, into[number % AHEAD], given, dtype)
        posted = post_each(*([(m.peer, flat) for m, flat, _ in side] for side in (sends, receives)), tag=tag, most=2)
        under_way.append(partial(_arrive, posted, receives, put))

    def finish() -> None:
        while under_way:
            under_way.popleft()()

    return Pending(finish)


def _parts(messages: Sequence[Message], room: torch.Tensor, side: Place | None, dtype: torch.dtype) -> list[Part]:
    """The messages of a round, where their elements lie if that is in one stretch of a parameter of `side`, and else
    one after the other in `room`."""
    found, at = [], 0
    for message in messages:
        for part in divided(message):
            flat = _in_place(part, side, dtype)
            found.append((part, room[at : at + part.size()] if flat is None else flat, flat is not None))
            at += part.size() if flat is None else 0
    return found


def _in_place(message: Message, side: Place | None, dtype: torch.dtype) -> torch.Tensor | None:
    if side is None or len(message.boxes) > 1 or not side.has(*message.boxes[0]):
        return None
    view = side.view(*message.boxes[0])
    return view.view(-1) if view.dtype == dtype and view.is_contiguous() else None


def _pack(message: Message, out: torch.Tensor, src: Place | None, came: Arrived) -> None:
    """Boxes that this rank holds, and boxes that came two rounds before."""
    for name, box, view in _views(message, out):
        if src is not None and src.has(name, box):
            view.copy_(src.view(name, box))
            continue
        for there, value in came[name]:
            if (both := intersect(there, box)) is not None:
                view[inside(both, box)] = value[inside(both, there)]


@torch.no_grad()
def _arrive(posted: Post, receives: Sequence[Part], put: Callable[[str, Box, torch.Tensor], None]) -> Arrived:
    """Wait for a round, and keep what came."""
    posted.wait()
    found: Arrived = {}
    for message, flat, in_place in receives:
        for name, box, value in _views(message, flat):
            if not in_place:
                put(name, box, value)
            found.setdefault(name, []).append((box, value))
    return found


def _views(message: Message, flat: torch.Tensor) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Each box of a message with its elements."""
    at = 0
    for name, box in message.boxes:
        yield name, box, flat[at : (at := at + volume(box))].view([stop - start for start, stop in box])
