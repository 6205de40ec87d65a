"""Lines: the boxes that the same ranks hold before a layout change and the same ranks want after it, end to end.

In: a model and two layouts. Out: `Line`s, whose boxes cover every parameter exactly once. No piece of either layout
crosses a box. Parameters of all layers that lie between the same two stages share an entry, so that the number of lines
and entries depends on degrees and kinds of parameters, never on ranks or layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.sharding.boxes import Box, Cell, Parameter, contains, each, pieces_at, places, stages, volume

LONG = 256  # rows: a part is then right to within that share of its box

Standing = tuple[tuple[int, int], ...]  # (part, shard) of a layout, ascending


@dataclass(frozen=True, slots=True)
class Entry:
    """`box` of one parameter in each of some layers (None: it belongs to no layer), from `start` on its line on."""

    spec: str
    layers: tuple[int | None, ...]
    box: Box
    start: int

    def name(self, i: int) -> str:
        """The parameter in the i-th of the layers."""
        layer = self.layers[i]
        return self.spec if layer is None else self.spec.replace("{}", str(layer), 1)


@dataclass(frozen=True, slots=True)
class Line:
    """have, want: the cells of the source and of the destination, ascending. size: elements."""

    have: tuple[Cell, ...]
    want: tuple[Cell, ...]
    entries: tuple[Entry, ...]
    size: int


def lines(model: Model, src: Layout, dst: Layout) -> tuple[Line, ...]:
    """All lines, in the order in which their first boxes come in the model."""
    entries: dict[tuple[tuple[Cell, ...], tuple[Cell, ...]], list[Entry]] = defaultdict(list)
    sizes: dict[tuple[tuple[Cell, ...], tuple[Cell, ...]], int] = defaultdict(int)

    @cache
    def cells(at: tuple[int, ...], part: Standing) -> tuple[Cell, ...]:
        return tuple(Cell(s, *x) for s in sorted(at) for x in part)

    for spec in model.params:
        atoms = tuple(_atoms(spec, src, dst))
        between: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Parameter]] = defaultdict(list)
        for p in each((spec,), model.layers):
            between[stages(p, model.layers, src), stages(p, model.layers, dst)].append(p)
        for ends, found in between.items():
            layers = tuple(p.layer for p in found)
            for box, parts in atoms:
                have, want = (cells(at, part) for at, part in zip(ends, parts))
                entries[have, want].append(Entry(spec.name, layers, box, sizes[have, want]))
                sizes[have, want] += volume(box) * len(layers)
    return tuple(Line(*key, tuple(found), sizes[key]) for key, found in entries.items())


def _atoms(spec: ParamSpec, src: Layout, dst: Layout) -> Iterator[tuple[Box, tuple[Standing, Standing]]]:
    """The boxes of one parameter that no piece crosses, with the places of either layout that have each."""
    sides = [[(place, p.box) for place in places(at) for p in pieces_at(spec, at, *place)] for at in (src, dst)]
    boxes = [box for side in sides for _, box in side]
    cuts = [sorted({end for box in boxes for end in box[d]}) for d in range(len(spec.shape))]
    rows = [_by_row(side, cuts[0] if cuts else ()) for side in sides]
    for at, row in enumerate(pairwise(cuts[0]) if cuts else ((),)):
        for rest in product(*(tuple(pairwise(c)) for c in cuts[1:])):
            box = (row, *rest) if cuts else ()
            have, want = (tuple(place for place, outer in found[at] if contains(outer, box)) for found in rows)
            assert have, f"nobody holds {box} of {spec.name}"
            if want:
                yield box, (have, want)


def _by_row(side: list[tuple[tuple[int, int], Box]],
            cuts: Sequence[int]) -> list[list[tuple[tuple[int, int], Box]]]:
    """Between each two cuts of dimension 0, the pieces that reach over it: few, where rows are divided many times."""
    found: list[list[tuple[tuple[int, int], Box]]] = [[] for _ in range(max(len(cuts) - 1, 1))]
    for piece in side:
        first, past = (bisect_left(cuts, end) for end in piece[1][0]) if cuts else (0, 1)
        for at in range(first, past):
            found[at].append(piece)
    return found


def boxes(line: Line, start: int, stop: int) -> Iterator[tuple[str, Box]]:
    """What lies in [start, stop) of a line, each box cut at the nearest whole row; so neighbouring stretches never
    overlap and leave nothing out."""
    at = bisect_right(line.entries, start, key=lambda e: e.start) - 1
    while at < len(line.entries) and (entry := line.entries[at]).start < stop:
        size = volume(entry.box)
        dim = _cut(entry.box)
        low, high = entry.box[dim] if entry.box else (0, 1)
        row = size // (high - low)
        here, end = max(start - entry.start, 0), min(stop - entry.start, size * len(entry.layers))
        for i in range(here // size, -(-end // size)):
            first = (2 * max(here - i * size, 0) + row) // (2 * row)
            last = (2 * min(end - i * size, size) + row) // (2 * row)
            if first < last:
                part = entry.box[:dim] + ((low + first, low + last),) + entry.box[dim + 1 :]
                yield entry.name(i), part if entry.box else ()
        at += 1


def _cut(box: Box) -> int:
    """The dimension to cut a box along: the first that is long, since what it leaves then lies together in memory."""
    sizes = [stop - start for start, stop in box]
    return next((d for d, n in enumerate(sizes) if n >= LONG or n == max(sizes)), 0)
