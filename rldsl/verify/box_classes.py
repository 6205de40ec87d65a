"""The box classes of a resharding state correctly who holds and who needs which box.

In: a model, two layouts, the `BoxClass`es of their routes. Out: faults (RL0527). Proved: the boxes that a cell of the
destination needs make up its pieces of every parameter, each element once; and the holders of a class are the cells of
the source that have its boxes, all of them and no others. Pieces are those of `sharding/boxes.py`, which defines what a
layout means. Boxes with the same ends are checked once, whatever the number of layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.reshard.box_classes import BoxClass
from rldsl.sharding.boxes import Box, Cell, Parameter, contains, intersect, part_shard_pairs, pieces_at, stages, volume

Claim = tuple[Box, tuple[Cell, ...], tuple[Cell, ...]]  # a box, who is said to have it, who is said to want it


def class_faults(model: Model, src: Layout, dst: Layout,
                 classes: Sequence[BoxClass]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Code, what is wrong, no ranks."""
    yield from (("RL0527", what, ()) for what in _faults(model, src, dst, classes))


def _faults(model: Model, src: Layout, dst: Layout, classes: Sequence[BoxClass]) -> Iterator[str]:
    said: dict[tuple[str, int | None], list[Claim]] = defaultdict(list)
    for i, box_class in enumerate(classes):
        at = 0
        for e in box_class.segments:
            if e.start != at:
                yield f"box {e.box} of {e.spec} does not begin where the previous box of box class {i} ends"
            at = e.start + volume(e.box) * len(e.layers)
            for layer in e.layers:
                said[e.spec, layer].append((e.box, box_class.holders, box_class.needers))
        if at != box_class.size:
            yield f"box class {i} has {box_class.size} elements, its boxes have {at}"
    tested: dict[object, str] = {}
    for spec in model.params:
        sides = (_Pieces(spec, src), _Pieces(spec, dst))
        every = range(spec.layers or model.layers) if "{}" in spec.name else (None,)
        for layer in every:
            p = Parameter(spec.name, spec, layer)
            ends = (stages(p, model.layers, src), stages(p, model.layers, dst))
            found = tuple(said.pop((spec.name, layer), ()))
            key = (spec.name, ends, found)
            if key not in tested:
                tested[key] = _fault(sides, ends, found)
            if tested[key]:
                yield f"{spec.name}{'' if layer is None else f', layer {layer}'}: {tested[key]}"
    for name, layer in said:
        yield f"{name} {layer}: the model has no such parameter"


class _Pieces:
    """The boxes of a parameter at each (part, shard) of a layout, to be asked by box. reach: how far the rows of the
    pieces up to one go."""

    def __init__(self, spec: ParamSpec, layout: Layout):
        self.at = {place: tuple(p.box for p in pieces_at(spec, layout, *place)) for place in part_shard_pairs(layout)}
        by_rows: dict[tuple[int, int], list[tuple[Box, tuple[int, int]]]] = defaultdict(list)
        for place, boxes in self.at.items():
            for box in boxes:
                by_rows[box[0] if box else (0, 1)].append((box, place))
        self.rows = sorted(by_rows.items())
        self.starts = [start for (start, _), _ in self.rows]
        self.reach = list(accumulate((stop for (_, stop), _ in self.rows), max))

    def holders(self, box: Box) -> set[tuple[int, int]]:
        start, stop = box[0] if box else (0, 1)
        found: set[tuple[int, int]] = set()
        at = bisect_right(self.starts, start) - 1
        while at >= 0 and self.reach[at] >= stop:
            found |= {place for outer, place in self.rows[at][1] if contains(outer, box)}
            at -= 1
        return found


def _fault(sides: tuple[_Pieces, _Pieces], ends: tuple[tuple[int, ...], tuple[int, ...]], said: Sequence[Claim]) -> str:
    wanted: dict[Cell, list[Box]] = defaultdict(list)
    for box, have, want in said:
        holders = {Cell(stage, *place) for place in sides[0].holders(box) for stage in ends[0]}
        if {*have} != holders or len({*have}) != len(have):
            return f"box {box} should be held by {_cell_text(holders)}, not by {_cell_text(have)}"
        for cell in want:
            wanted[cell].append(box)
    for stage in ends[1]:
        for place, whole in sides[1].at.items():
            if not _covers(whole, wanted.pop(Cell(stage, *place), [])):
                return f"cell {_cell_text([Cell(stage, *place)])} of the destination does not get its pieces once each"
    return f"cells {_cell_text(wanted)} get what they do not need" if wanted else ""


def _covers(whole: Sequence[Box], got: Sequence[Box]) -> bool:
    """Whether `got` is a division of `whole`, whose boxes are disjoint."""
    return (all(any(contains(w, b) for w in whole) for b in got)
            and sum(map(volume, got)) == sum(map(volume, whole))
            and not overlapping(got))


def overlapping(boxes: Sequence[Box]) -> bool:
    """Whether any two have something in common. Only those whose rows meet are compared."""
    ordered = sorted(boxes)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if a and b[0][0] >= a[0][1]:
                break
            if intersect(a, b) is not None:
                return True
    return False


def _cell_text(cells: object) -> str:
    return ", ".join(f"{c.pp_rank}.{c.part}" + (f".{c.zero_shard}" if c.zero_shard else "")
                     for c in sorted(cells)) or "nobody"  # type: ignore[call-overload]
