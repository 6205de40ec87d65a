"""Which messages of a resharding need no buffer, because their elements are contiguous in a parameter.

In: the rounds of a rank, and what it holds under both layouts. Out: how many elements need buffers. The runtime decides
from its tensors and the memory estimate from their shapes; both use the rules of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rldsl.plan.model import Layout, Model
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, Message, Round
from rldsl.sharding.boxes import Box, Cell, Parameter, Piece, contains, local_shape, parameters, pieces_of_cell, volume

MIN_SEPARATE = 1 << 18  # elements: packing and unpacking so many costs more than one more message
MAX_PARTS = 5  # that a message to one peer is split into, at most, in a round

Held = Mapping[str, tuple[Parameter, tuple[Piece, ...]]]


def pieces_by_parameter(model: Model, layout: Layout, at: Cell | None) -> Held:
    """What the ranks at a cell hold of every parameter, by its name."""
    return {p.name: (p, pieces_of_cell(p, model.layers, layout, at)) for p in parameters(model)}


def split_message(message: Message) -> tuple[Message, ...]:
    """At most `MAX_PARTS` messages: the largest boxes travel separately, so that they need not be copied. Sender and
    receiver split a message in the same way."""
    if len(message.boxes) == 1:
        return (message,)
    sizes = [volume(box) for _, box in message.boxes]
    largest = sorted(range(len(sizes)), key=lambda i: -sizes[i])[: MAX_PARTS - 1]
    alone = sorted(i for i in largest if sizes[i] >= MIN_SEPARATE or 2 * sizes[i] >= sum(sizes))
    rest = tuple(b for i, b in enumerate(message.boxes) if i not in alone)
    return tuple(Message(message.peer, some) for some in (*((message.boxes[i],) for i in alone), rest) if some)


def is_contiguous(message: Message, held: Held) -> bool:
    """Whether the elements of a message are contiguous in a row-major local tensor."""
    if len(message.boxes) > 1:
        return False
    (name, box), = message.boxes
    parameter, pieces = held[name]
    if not any(contains(p.box, box) for p in pieces):
        return False
    return _is_contiguous_box(local_shape(parameter, pieces), box)


def _is_contiguous_box(shape: tuple[int, ...], box: Box) -> bool:
    """A box is contiguous if every dimension before the innermost partial one has a single index."""
    counts = [stop - start for start, stop in box]
    inner = len(shape)
    while inner and counts[inner - 1] == shape[inner - 1]:
        inner -= 1
    return all(n == 1 for n in counts[: max(0, inner - 1)])


def buffer_elements(rounds: Iterable[int]) -> list[int]:
    """Elements of the send or receive buffers: one buffer per round in flight, as large as the largest round that uses
    it. rounds: elements of each round that need a buffer."""
    largest = [0] * ROUNDS_IN_FLIGHT
    for number, size in enumerate(rounds):
        largest[number % ROUNDS_IN_FLIGHT] = max(largest[number % ROUNDS_IN_FLIGHT], size)
    return largest


def packed_elements(ops: Round,
                    in_place: tuple[Callable[[Message], bool], Callable[[Message], bool]]) -> tuple[int, int]:
    """Elements of a round that need a buffer, of sends and of receives. in_place: whether a part that is sent, and one
    that is received, is contiguous in a parameter."""
    sends, receives = ([part for message in side for part in split_message(message)]
                       for side in (ops.sends, ops.receives))
    return (sum(m.size() for m in sends if not in_place[0](m)), sum(m.size() for m in receives if not in_place[1](m)))
