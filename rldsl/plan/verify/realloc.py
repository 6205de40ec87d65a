"""Reallocs move what they say, and their destinations get every parameter exactly once.

In: tables with sound references. Out: diagnostics RL0526 (bytes, messages or digest differ from the expansion) and
RL0527 (a destination box has a gap or an overlap, or a source does not hold what it sends). The expansion is
`movement.realloc_moves`, the function that every rank runs; its result is not believed but tested, with a box test of
this file's own on top of `boxes.holding`. Moves of equal boxes in several layers are tested once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod

from rldsl.diag import Diagnostic
from rldsl.plan import boxes, movement
from rldsl.plan.events import Realloc
from rldsl.plan.model import Model
from rldsl.plan.verify.tables import Tables, name, problem

Box = tuple[tuple[int, int], ...]
Received = dict[tuple[str, int], list[tuple[Box, int]]]  # (parameter, destination) -> boxes with their sources


def check(t: Tables) -> Iterator[Diagnostic]:
    known: dict[tuple[str, str, str, str, bool], tuple[int, int, str, list[tuple[str, int]]]] = {}
    for event, _ in t.events:
        if not isinstance(event, Realloc):
            continue
        key = (event.model, event.source, event.src, event.dst, event.decay > 0)
        if key not in known:
            known[key] = _expand(t, event)
        total, messages, digest, gaps = known[key]
        if (event.bytes, event.messages, event.digest) != (total, messages, digest):
            yield problem(
                "RL0526",
                f"{name(event)} says {event.bytes} bytes in {event.messages} messages, but moving "
                f"{event.model} from {event.src} to {event.dst} takes {total} in {messages}"
                + ("" if event.digest == digest else ", and the digest of its moves differs"),
                event,
                ranks=t.event_ranks(event),
            )
        for parameter, rank in gaps:
            yield problem(
                "RL0527", f"{name(event)} does not bring {parameter} to rank {rank} exactly once", event, ranks=(rank,)
            )


def _expand(t: Tables, e: Realloc) -> tuple[int, int, str, list[tuple[str, int]]]:
    model, src, dst = t.models[e.model], t.layouts[e.src], t.layouts[e.dst]
    # Layouts of equal ranks may name different meshes; the planner wants each layout's own.
    moves = movement.realloc_moves(
        model, src, t.meshes[src.mesh], dst, t.meshes[dst.mesh], t.plan.header.devices_per_node
    )
    source = t.models[e.source or e.model]
    total = movement.summary(moves, movement.carried(source, e.src, model, e.dst, e.decay))
    return total.bytes, total.messages, movement.digest(moves), list(_gaps(t, e, model, moves))


def _gaps(t: Tables, e: Realloc, model: Model, moves: Sequence[movement.Move]) -> Iterator[tuple[str, int]]:
    """(parameter, rank) that does not get its boxes exactly once, from ranks that have them."""
    received: Received = defaultdict(list)
    for move in moves:
        received[move.name, move.dst].append((move.box, move.src))
    held = _Holdings(t, model)
    tested: dict[object, bool] = {}
    for parameter in boxes.parameters(model):
        for rank in sorted(t.layout_ranks(e.src) | t.layout_ranks(e.dst)):
            want, own = held.of(parameter, e.dst, rank), held.of(parameter, e.src, rank)
            got = received.get((parameter.name, rank), [])
            sources = tuple((box, held.of(parameter, e.src, src)) for box, src in got)
            key = (want, own, sources)
            if key not in tested:
                tested[key] = _covered(want, own, [b for b, _ in got]) and all(_lies_in(b, h) for b, h in sources)
            if not tested[key]:
                yield parameter.name, rank


class _Holdings:
    """Boxes by coordinate, computed once for each (parameter pattern, stage, tp index)."""

    def __init__(self, t: Tables, model: Model):
        self.t, self.model = t, model
        self.places: dict[str, dict[int, int]] = {}
        self.known: dict[tuple[str, int | None, str, int, int], tuple[Box, ...]] = {}

    def of(self, parameter: boxes.Parameter, layout: str, rank: int) -> tuple[Box, ...]:
        x = self.t.layouts[layout]
        if layout not in self.places:
            self.places[layout] = {r: i for i, r in enumerate(self.t.meshes[x.mesh].members())}
        index = self.places[layout].get(rank)
        if index is None:
            return ()
        key = (parameter.spec.name, parameter.layer, layout, index // (x.dp * x.cp * x.tp), index % x.tp)
        if key not in self.known:
            pieces = boxes.holding(parameter, self.model.layers, x, self.t.meshes[x.mesh], rank)
            self.known[key] = tuple(p.box for p in pieces)
        return self.known[key]


def _covered(want: Sequence[Box], own: Sequence[Box], got: Sequence[Box]) -> bool:
    """`want` is the disjoint union of what the rank has of it and what it gets."""
    have = [both for w in want for o in own if (both := _common(w, o))]
    parts = [*have, *got]
    return (
        all(not _common(a, b) for a, b in combinations(parts, 2))
        and all(_lies_in(b, want) for b in got)
        and sum(map(_size, parts)) == sum(map(_size, want))
    )


def _common(a: Box, b: Box) -> Box | None:
    """The box that both contain; None when empty. A scalar's box () is shared by all."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(p < q for p, q in both) else None


def _lies_in(inner: Box, outer: Sequence[Box]) -> bool:
    return any(all(p <= a and b <= q for (a, b), (p, q) in zip(inner, o, strict=True)) for o in outer)


def _size(box: Box) -> int:
    return prod(b - a for a, b in box)
