"""Box classes: the boxes that the same cells hold before a layout change and the same cells want after it.

In: a model and two layouts. Out: `BoxClass`es, whose boxes cover every parameter exactly once; no piece of either
layout crosses a box. The boxes of a class are laid end to end, so an offset addresses an element. Layers that move
between the same two pipeline stages share a segment. So the number of classes and segments depends on degrees and on
kinds of parameters, never on ranks or layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.sharding.boxes import Box, Cell, Parameter, Piece, expand_specs, geometry, pieces_by_pair, stages, volume

MIN_CUT_ROWS = 256  # cutting a box at whole rows then misses the wanted offset by at most 1/256 of the box

PartShardPairs = tuple[tuple[int, int], ...]  # (part, zero shard) of a layout, ascending


class Segment(NamedTuple):  # a tuple: there are tens of thousands, and a frozen dataclass takes four times as long
    """The same box of one parameter in each of several layers."""

    spec: str  # name of the parameter; "{}" stands for the layer
    layers: tuple[int | None, ...]  # None: the parameter belongs to no layer
    box: Box  # of the parameter, the same in each layer
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
    segments: tuple[Segment, ...]  # in the order in which they are laid out
    size: int  # elements


def box_classes(model: Model, src: Layout, dst: Layout) -> tuple[BoxClass, ...]:
    """All classes, in the order of their first boxes in the model."""
    # By the identities of holders and needers: there is one object for equal pairs, and so one for equal cells. Hashing
    # tuples of tuples for every box takes longer than all else here.
    entries: dict[tuple[int, int], _Entry] = {}
    interned: dict[PartShardPairs, PartShardPairs] = {}
    of_pairs: dict[tuple[int, tuple[int, ...]], tuple[Cell, ...]] = {}  # by the identity of the pairs, and pp ranks
    divided: dict[object, tuple[_Uncut, ...]] = {}

    def cells(pp_ranks: tuple[int, ...], pairs: PartShardPairs) -> tuple[Cell, ...]:
        if (found := of_pairs.get(key := (id(pairs), pp_ranks))) is None:
            found = of_pairs[key] = tuple([Cell(pp_rank, *pair) for pp_rank in pp_ranks for pair in pairs])
        return found

    def entry_of(have: tuple[Cell, ...], want: tuple[Cell, ...]) -> _Entry:
        if (entry := entries.get((id(have), id(want)))) is None:
            entry = entries[id(have), id(want)] = _Entry(have, want)
        return entry

    placed: dict[object, list[tuple[Box, int, _Entry]]] = {}  # by geometry and pp ranks: box, elements, its class
    for spec in model.params:
        key = geometry(spec)
        if key not in divided:
            divided[key] = tuple(_uncut_boxes(spec, src, dst, interned))
        between: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Parameter]] = defaultdict(list)
        for p in expand_specs((spec,), model.layers):
            between[stages(p, model.layers, src), stages(p, model.layers, dst)].append(p)
        for pp_ranks, same_stages in between.items():
            layers, name = tuple(p.layer for p in same_stages), spec.name
            count = len(layers)
            if (boxes := placed.get((key, pp_ranks))) is None:
                boxes = placed[key, pp_ranks] = [
                    (box, elements, entry_of(cells(pp_ranks[0], have), cells(pp_ranks[1], want)))
                    for box, elements, have, want in divided[key]]
            for box, elements, entry in boxes:
                entry.segments.append(Segment(name, layers, box, entry.size))
                entry.size += elements * count
    return tuple(BoxClass(e.holders, e.needers, tuple(e.segments), e.size) for e in entries.values())


@dataclass(slots=True)
class _Entry:
    """A box class while its segments are collected."""

    holders: tuple[Cell, ...]  # as of a `BoxClass`
    needers: tuple[Cell, ...]  # as of a `BoxClass`
    segments: list[Segment] = field(default_factory=list)  # collected so far
    size: int = 0  # elements


class _Uncut(NamedTuple):
    """A box that no piece of either layout crosses."""

    box: Box  # of one parameter
    elements: int  # of the box
    have: PartShardPairs  # those of the source that hold it; one object for equal pairs
    want: PartShardPairs  # those of the destination that want it


def _uncut_boxes(spec: ParamSpec, src: Layout, dst: Layout,
                 interned: dict[PartShardPairs, PartShardPairs]) -> Iterator[_Uncut]:
    """The division of one parameter that the pieces of both layouts make, without what the destination does not
    want. interned: the pairs found so far, one object for equal ones."""
    sides = [pieces_by_pair(spec, layout) for layout in (src, dst)]
    boxes = [piece.box for side in sides for pieces in side.values() for piece in pieces]
    cuts = [sorted({end for box in boxes for end in box[d]}) for d in range(len(spec.shape))]
    covering = [_covering(side, cuts) for side in sides]
    intervals = [tuple(pairwise(c)) for c in cuts]
    rest = [(at, tuple(box[1] for box in chosen)) for at, chosen in enumerate(product(*map(enumerate, intervals[1:])))]
    for row, first in enumerate(intervals[0] if intervals else ((0, 1),)):
        for at, others in rest:
            box: Box = (first, *others) if cuts else ()
            have, want = (tuple(side.get((row, at), ())) for side in covering)
            if not have:
                raise internal_error(f"no rank of the source holds {box} of {spec.name}", place="resharding")
            if want:
                yield _Uncut(box, volume(box), interned.setdefault(have, have), interned.setdefault(want, want))


def _covering(side: Mapping[tuple[int, int], Sequence[Piece]],
              cuts: Sequence[Sequence[int]]) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
    """The pairs that have a box, in order. Boxes by their place: (number of the interval between two cuts of dimension
    0, number among all combinations of intervals of the others). Each piece is laid on the boxes that it covers, so
    layouts that divide the rows many times are not compared piece by piece."""
    index = [{end: at for at, end in enumerate(c)} for c in cuts]
    counts = [len(c) - 1 for c in cuts[1:]]
    inner: dict[Box, list[int]] = {}  # what a piece is in all other dimensions -> the combinations that it covers
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for pair, pieces in side.items():
        for piece in pieces:
            box = piece.box
            if box[1:] not in inner:
                places = [0]
                for (start, stop), at, count in zip(box[1:], index[1:], counts, strict=True):
                    places = [place * count + i for place in places for i in range(at[start], at[stop])]
                inner[box[1:]] = places
            for row in range(index[0][box[0][0]], index[0][box[0][1]]) if box else (0,):
                for place in inner[box[1:]]:
                    found[row, place].append(pair)
    return found


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
