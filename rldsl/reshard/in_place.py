"""Which messages of a resharding need no buffer, because their elements are contiguous in a parameter.

In: the rounds of a rank, and what it holds under both layouts. Out: how many elements need buffers. The runtime decides
from its tensors and the memory estimate from their shapes; both use the rules of this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rldsl.plan.model import Layout, Model
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, Message
from rldsl.sharding.boxes import Box, Cell, Parameter, Piece, contains, local_shape, parameters, pieces_of_cell, volume

MIN_SEPARATE = 1 << 18  # elements: packing and unpacking more costs more than one more message
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
    alone = _alone([volume(box) for _, box in message.boxes])
    rest = tuple(b for i, b in enumerate(message.boxes) if i not in alone)
    return tuple(Message(message.peer, some) for some in (*((message.boxes[i],) for i in alone), rest) if some)


def _alone(sizes: Sequence[int]) -> list[int]:
    """Which of several boxes of these sizes travel separately, ascending."""
    largest = sorted(range(len(sizes)), key=lambda i: -sizes[i])[: MAX_PARTS - 1]
    enough = min(MIN_SEPARATE, (sum(sizes) + 1) // 2)
    return sorted(i for i in largest if sizes[i] >= enough)


def is_contiguous(message: Message, held: Held) -> bool:
    """Whether the elements of a message are contiguous in a row-major local tensor."""
    if len(message.boxes) > 1:
        return False
    (name, box), = message.boxes
    return is_contiguous_box(name, box, held)


def is_contiguous_box(name: str, box: Box, held: Held) -> bool:
    """Whether a box of a parameter is contiguous in a row-major local tensor: every dimension before the innermost
    partial one has a single index."""
    parameter, pieces = held[name]
    for piece in pieces:
        if contains(piece.box, box):
            break
    else:
        return False
    shape = local_shape(parameter, pieces)
    inner = len(shape)
    while inner and box[inner - 1][1] - box[inner - 1][0] == shape[inner - 1]:
        inner -= 1
    return not any(stop - start != 1 for start, stop in box[: max(0, inner - 1)])


def buffer_elements(rounds: Iterable[int]) -> list[int]:
    """Elements of the send or receive buffers: one buffer per round in flight, as large as the largest round that uses
    it. rounds: elements of each round that need a buffer."""
    largest = [0] * ROUNDS_IN_FLIGHT
    for number, size in enumerate(rounds):
        largest[number % ROUNDS_IN_FLIGHT] = max(largest[number % ROUNDS_IN_FLIGHT], size)
    return largest


def elements_to_pack(messages: Iterable[Message], held: Held | None) -> int:
    """Elements of the parts that `split_message` makes of the messages and that are not contiguous in a parameter."""
    total = 0
    for message in messages:
        sizes = [volume(box) for _, box in message.boxes]
        total += sum(sizes)
        if held is not None:
            alone = _alone(sizes) if len(sizes) > 1 else [0]
            if len(alone) + 1 == len(sizes):  # so is the rest
                alone = [*range(len(sizes))]
            total -= sum(sizes[i] for i in alone if is_contiguous_box(*message.boxes[i], held))
    return total
