"""Which messages of a reallocation need no buffer: their elements lie in one stretch of a parameter.

In: the rounds of a rank, and what it holds under both layouts. Out: the elements that it needs buffers for. The runtime
decides by its tensors, the memory estimate by their shapes; both ask here how a message is divided and what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rldsl.plan.boxes import Box, Cell, Parameter, Piece, contains, held, local_shape, parameters, volume
from rldsl.plan.model import Layout, Model
from rldsl.plan.realloc.rounds import AHEAD, Message, Round

Held = Mapping[str, tuple[Parameter, tuple[Piece, ...]]]


def held_at(model: Model, layout: Layout, at: Cell | None) -> Held:
    """What the ranks at a cell hold of every parameter."""
    return {p.name: (p, held(p, model.layers, layout, at)) for p in parameters(model)}


def divided(message: Message) -> tuple[Message, ...]:
    """A box of at least half of a message goes by itself, so that it need not be copied; both ends see that alike."""
    sizes = [volume(box) for _, box in message.boxes]
    at = sizes.index(max(sizes))
    if len(sizes) == 1 or 2 * sizes[at] < sum(sizes):
        return (message,)
    rest = (*message.boxes[:at], *message.boxes[at + 1 :])
    return Message(message.peer, (message.boxes[at],)), Message(message.peer, rest)


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


def room(rounds: Iterable[tuple[int, Round]], total: int, direct_send: Callable[[Message], bool],
         direct_receive: Callable[[Message], bool]) -> tuple[list[int], list[int]]:
    """Elements of the buffers for sends and for receives: one for each round under way, as large as the largest round
    that uses it. rounds: with their numbers, of `total`. direct: whether what is sent, or received, needs none. What is
    sent in the last rounds always does: they are waited for late, and until then the source may change."""
    out, into = [0] * AHEAD, [0] * AHEAD
    for number, ops in rounds:
        late = number >= total - AHEAD
        sent = sum(m.size() for part in ops.sends for m in divided(part) if late or not direct_send(m))
        came = sum(m.size() for part in ops.receives for m in divided(part) if not direct_receive(m))
        out[number % AHEAD] = max(out[number % AHEAD], sent)
        into[number % AHEAD] = max(into[number % AHEAD], came)
    return out, into
