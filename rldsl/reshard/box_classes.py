"""Box classes: the boxes that the same cells hold before a layout change and the same cells want after it.

In: a model and two layouts. Out: `BoxClass`es, whose boxes cover every parameter exactly once; no piece of either
layout crosses a box. The boxes of a class are laid end to end, so an offset addresses an element. Layers that move
between the same two pipeline stages share a segment. So the number of classes and segments depends on degrees and on
kinds of parameters, never on ranks or layers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise, product

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.sharding.boxes import Box, Cell, Parameter, contains, expand_specs, pieces_by_pair, stages, volume

MIN_CUT_ROWS = 256  # cutting a box at whole rows then misses the wanted offset by at most 1/256 of the box

PartShardPairs = tuple[tuple[int, int], ...]  # (part, zero shard) of a layout, ascending


@dataclass(frozen=True, slots=True)
class Segment:
    """The same box of one parameter in each of several layers."""

    spec: str  # name of the parameter; "{}" stands for the layer
    layers: tuple[int | None, ...]  # None: the parameter belongs to no layer
    box: Box
    start: int  # offset of its first element in the class

    def name(self, i: int) -> str:
        """The parameter in the i-th of the layers."""
        layer = self.layers[i]
        return self.spec if layer is None else self.spec.replace("{}", str(layer), 1)


@dataclass(frozen=True, slots=True)
class BoxClass:
    """Boxes that the same cells hold and the same cells want, laid end to end."""

    holders: tuple[Cell, ...]  # of the source layout, ascending
    needers: tuple[Cell, ...]  # of the destination layout, ascending
    segments: tuple[Segment, ...]
    size: int  # elements


def box_classes(model: Model, src: Layout, dst: Layout) -> tuple[BoxClass, ...]:
    """All classes, in the order of their first boxes in the model."""
    # by the identities of holders and needers: `cells` returns one object for equal cells, and hashing tuples of
    # tuples for every box takes longer than all else here
    entries: dict[tuple[int, int], _Entry] = {}
    known: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}

    @cache
    def cells(pp_ranks: tuple[int, ...], pairs: PartShardPairs) -> tuple[Cell, ...]:
        found = tuple(Cell(pp_rank, *pair) for pp_rank in sorted(pp_ranks) for pair in pairs)
        return known.setdefault(found, found)

    for spec in model.params:
        uncut = tuple(_uncut_boxes(spec, src, dst))
        between: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Parameter]] = defaultdict(list)
        for p in expand_specs((spec,), model.layers):
            between[stages(p, model.layers, src), stages(p, model.layers, dst)].append(p)
        for pp_ranks, same_stages in between.items():
            layers = tuple(p.layer for p in same_stages)
            for box, (having, wanting) in uncut:
                have, want = cells(pp_ranks[0], having), cells(pp_ranks[1], wanting)
                entry = entries.get((id(have), id(want)))
                if entry is None:
                    entry = entries[id(have), id(want)] = _Entry(have, want)
                entry.segments.append(Segment(spec.name, layers, box, entry.size))
                entry.size += volume(box) * len(layers)
    return tuple(BoxClass(e.holders, e.needers, tuple(e.segments), e.size) for e in entries.values())


@dataclass(slots=True)
class _Entry:
    """A box class while its segments are collected."""

    holders: tuple[Cell, ...]
    needers: tuple[Cell, ...]
    segments: list[Segment] = field(default_factory=list)
    size: int = 0  # elements


def _uncut_boxes(spec: ParamSpec, src: Layout,
                 dst: Layout) -> Iterator[tuple[Box, tuple[PartShardPairs, PartShardPairs]]]:
    """The boxes of one parameter that no piece of either layout crosses, each with the (part, zero shard) pairs of the
    source that hold it and those of the destination that want it."""
    sides = [[(pair, p.box) for pair, pieces in pieces_by_pair(spec, layout).items() for p in pieces]
             for layout in (src, dst)]
    boxes = [box for side in sides for _, box in side]
    cuts = [sorted({end for box in boxes for end in box[d]}) for d in range(len(spec.shape))]
    src_rows, dst_rows = (_by_row(side, cuts[0] if cuts else ()) for side in sides)
    rows: Iterable[tuple[int, int]] = pairwise(cuts[0]) if cuts else ((0, 1),)
    for at, row in enumerate(rows):
        for rest in product(*(tuple(pairwise(c)) for c in cuts[1:])):
            box: Box = (row, *rest) if cuts else ()
            have = tuple([pair for pair, outer in src_rows[at] if contains(outer, box)])
            want = tuple([pair for pair, outer in dst_rows[at] if contains(outer, box)])
            if not have:
                raise internal_error(f"no rank of the source holds {box} of {spec.name}", place="resharding")
            if want:
                yield box, (have, want)


def _by_row(side: list[tuple[tuple[int, int], Box]],
            cuts: Sequence[int]) -> list[list[tuple[tuple[int, int], Box]]]:
    """For each interval between two cuts of dimension 0, the pieces that cover it: an index, so that layouts which
    divide the rows many times are not compared piece by piece."""
    by_interval: list[list[tuple[tuple[int, int], Box]]] = [[] for _ in range(max(len(cuts) - 1, 1))]
    for piece in side:
        first, past = (bisect_left(cuts, end) for end in piece[1][0]) if cuts else (0, 1)
        for at in range(first, past):
            by_interval[at].append(piece)
    return by_interval


def boxes_between(box_class: BoxClass, start: int, stop: int) -> Iterator[tuple[str, Box]]:
    """What lies in [start, stop) of a class, by parameter. Each box is cut at the nearest whole row, so adjacent
    intervals neither overlap nor leave a gap."""
    at = bisect_right(box_class.segments, start, key=lambda segment: segment.start) - 1
    while at < len(box_class.segments) and (segment := box_class.segments[at]).start < stop:
        size, dim, low, row = _rows(segment.box)
        begin, end = max(start - segment.start, 0), min(stop - segment.start, size * len(segment.layers))
        for i in range(begin // size, -(-end // size)):
            # rows of the box of layer i, rounded to the nearest
            first = (2 * max(begin - i * size, 0) + row) // (2 * row)
            last = (2 * min(end - i * size, size) + row) // (2 * row)
            if first < last:
                part = segment.box[:dim] + ((low + first, low + last),) + segment.box[dim + 1 :]
                yield segment.name(i), part if segment.box else ()
        at += 1


@lru_cache(maxsize=1 << 16)
def _rows(box: Box) -> tuple[int, int, int, int]:
    """(elements, the dimension to cut along, its first index, elements of a row) of a box."""
    size, dim = volume(box), _cut_dimension(box)
    low, high = box[dim] if box else (0, 1)
    return size, dim, low, size // (high - low)


def _cut_dimension(box: Box) -> int:
    """The dimension to cut a box along: the first long one, since the parts are then contiguous in memory."""
    sizes = [stop - start for start, stop in box]
    return next((d for d, n in enumerate(sizes) if n >= MIN_CUT_ROWS or n == max(sizes)), 0)
