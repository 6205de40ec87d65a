"""Which messages of a reallocation need no buffer: their elements lie in one stretch of a parameter.

In: the rounds of a rank, and what it holds under both layouts. Out: the elements that it needs buffers for. The runtime
decides by its tensors, the memory estimate by their shapes; both ask here how a message is divided and what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rldsl.plan.model import Layout, Model
from rldsl.reshard.rounds import AHEAD, Message, Round
from rldsl.sharding.boxes import Box, Cell, Parameter, Piece, contains, held, local_shape, parameters, volume

ALONE = 1 << 18  # elements: to copy so many at both ends costs more than a message
PARTS = 5  # of a message to one peer in a round

Held = Mapping[str, tuple[Parameter, tuple[Piece, ...]]]


def held_at(model: Model, layout: Layout, at: Cell | None) -> Held:
    """What the ranks at a cell hold of every parameter."""
    return {p.name: (p, held(p, model.layers, layout, at)) for p in parameters(model)}


def divided(message: Message) -> tuple[Message, ...]:
    """At most `PARTS`: the largest boxes go by themselves, so that they need not be copied. Both ends see that
    alike."""
    sizes = [volume(box) for _, box in message.boxes]
    largest = sorted(range(len(sizes)), key=lambda i: -sizes[i])[: PARTS - 1]
    alone = sorted(i for i in largest if sizes[i] >= ALONE or 2 * sizes[i] >= sum(sizes))
    rest = tuple(b for i, b in enumerate(message.boxes) if i not in alone)
    return tuple(Message(message.peer, some) for some in (*((message.boxes[i],) for i in alone), rest) if some)


def together(message: Message, there: Held) -> bool:
    """Whether the elements of a message lie in one stretch of a local tensor, stored row by row."""
    if len(message.boxes) > 1:
        return False
    (name, box), = message.boxes
    parameter, pieces = there[name]
    if not any(contains(p.box, box) for p in pieces):
        return False
    return _one_stretch(local_shape(parameter, pieces), box)


def _one_stretch(shape: tuple[int, ...], box: Box) -> bool:
    """Dimensions before one that is taken in part have one index only."""
    counts = [stop - start for start, stop in box]
    inner = len(shape)
    while inner and counts[inner - 1] == shape[inner - 1]:
        inner -= 1
    return all(n == 1 for n in counts[: max(0, inner - 1)])


def room(rounds: Iterable[int]) -> list[int]:
    """Elements of the buffers of one side: one for each round under way, as large as the largest that uses it. rounds:
    elements of each that need a buffer."""
    found = [0] * AHEAD
    for number, size in enumerate(rounds):
        found[number % AHEAD] = max(found[number % AHEAD], size)
    return found


def packed(ops: Round, lies: tuple[Callable[[Message], bool], Callable[[Message], bool]]) -> tuple[int, int]:
    """Elements that need a buffer in a round: of sends, and of receives. lies: whether a part that is sent, or
    received, lies in one stretch."""
    sends, receives = ([m for whole in side for m in divided(whole)] for side in (ops.sends, ops.receives))
    return (sum(m.size() for m in sends if not lies[0](m)), sum(m.size() for m in receives if not lies[1](m)))
