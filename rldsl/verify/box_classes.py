"""The box classes of a resharding state correctly who holds and who needs which box.

In: a model, two layouts, the `BoxClass`es of their routes. Out: faults (RL0527). Proved: the boxes that a cell of the
destination needs make up its pieces of every parameter, each element once; and the holders of a class are the cells of
the source that have its boxes, all of them and no others. Pieces are those of `sharding/boxes.py`, which defines what a
layout means. Layers with the same boxes on the same pp ranks are checked once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate

from rldsl.plan.model import Layout, Model, ParamSpec
from rldsl.reshard.box_classes import BoxClass
from rldsl.sharding.boxes import Box, Cell, Parameter, contains, geometry, overlap, pieces_by_pair, stages, volume

Claim = tuple[Box, BoxClass]  # a box, and the class that states who holds and who needs it
Layers = tuple[int | None, ...]  # None: a parameter outside the layers
PartShard = tuple[int, int]  # (part, zero shard)
PPRanks = tuple[tuple[int, ...], tuple[int, ...]]  # of the source and the destination: those that hold a parameter
Pairs = frozenset[PartShard] | None  # of some cells: the same on each pp rank; None if they are not
Sides = tuple[Pairs, Pairs]  # of the holders and the needers of a box class


def class_faults(model: Model, src: Layout, dst: Layout,
                 classes: Sequence[BoxClass]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Code, what is wrong, no ranks."""
    yield from (("RL0527", what, ()) for what in _faults(model, src, dst, classes))


def _faults(model: Model, src: Layout, dst: Layout, classes: Sequence[BoxClass]) -> Iterator[str]:
    # of each spec, by the identity of the layers (many segments have one object): (layers, what is claimed of them)
    claims: dict[str, dict[int, tuple[Layers, list[Claim]]]] = defaultdict(dict)
    sizes: dict[int, int] = {}  # elements of a box, by its identity: many segments have one object
    for i, box_class in enumerate(classes):
        at = 0
        for spec_name, layers, box, start in box_class.segments:
            if start != at:
                yield f"box {box} of {spec_name} does not begin where the previous box of box class {i} ends"
            if (elements := sizes.get(id(box))) is None:
                elements = sizes[id(box)] = volume(box)
            at = start + elements * len(layers)
            of_spec = claims[spec_name]
            if (claimed := of_spec.get(id(layers))) is None:
                claimed = of_spec[id(layers)] = layers, []
            claimed[1].append((box, box_class))
        if at != box_class.size:
            yield f"box class {i} has {box_class.size} elements, its boxes have {at}"
    right = _RightClaims(src, dst)
    for spec in model.params:
        yield from _parameter_faults(model, spec, src, dst, claims.pop(spec.name, {}), right)
    for name in claims:
        yield f"{name}: the model has no such parameter"


def _parameter_faults(model: Model, spec: ParamSpec, src: Layout, dst: Layout,
                      claims: Mapping[int, tuple[Layers, Sequence[Claim]]], right: _RightClaims) -> Iterator[str]:
    """Layers with the same boxes on the same pp ranks are checked once. claims: by layers that are listed together."""
    layers = spec.layer_numbers(model.layers) or (None,)
    listed: dict[int | None, list[int]] = {layer: [] for layer in layers}  # where each layer is listed
    for together, (listed_layers, _) in claims.items():
        for layer in listed_layers:
            if layer not in listed:
                yield f"{spec.name} {layer}: the model has no such parameter"
            else:
                listed[layer].append(together)
    tested: dict[object, str] = {}
    for layer, lists in listed.items():
        p = Parameter(spec.name, spec, layer)
        pp_ranks = (stages(p, model.layers, src), stages(p, model.layers, dst))
        key = (pp_ranks, tuple(lists))
        if key not in tested:
            tested[key] = right.fault(spec, pp_ranks, [claim for together in lists for claim in claims[together][1]])
        if tested[key]:
            yield f"{spec.name}{'' if layer is None else f', layer {layer}'}: {tested[key]}"


class _RightClaims:
    """Finds what is wrong with claims, and remembers those that are right.

    Which boxes a (part, zero shard) pair holds depends on the geometry of a parameter, and not on its name or its pp
    ranks. So claims that differ only in these are checked once: in 70B PPO one parameter and stage of six."""

    def __init__(self, src: Layout, dst: Layout):
        self.layouts = src, dst
        self.pieces: dict[object, tuple[_Pieces, _Pieces]] = {}  # by geometry
        # geometry, pp ranks, and the identities of everything that is claimed: parameters with the same geometry on the
        # same pp ranks have the same objects
        self.same: set[tuple[object, tuple[int, ...]]] = set()
        self.sides: dict[PPRanks, dict[int, Sides]] = defaultdict(dict)  # of each box class, by its identity
        self.interned: dict[Sides, Sides] = {}
        # geometry and, for each claim, the identities of its box and of its pairs of both sides
        self.known: set[tuple[object, tuple[tuple[int, int], ...]]] = set()

    def fault(self, spec: ParamSpec, pp_ranks: PPRanks, claims: Sequence[Claim]) -> str:
        """What is wrong with the boxes of one parameter; "" if nothing. pp_ranks: of the source and the destination,
        those that hold it."""
        shape = geometry(spec)
        # The ids stay those of these objects: claims belong to the box classes.
        if (same := ((shape, pp_ranks), tuple([id(x) for claim in claims for x in claim]))) in self.same:
            return ""
        if shape not in self.pieces:
            self.pieces[shape] = _Pieces(spec, self.layouts[0]), _Pieces(spec, self.layouts[1])
        known = self.sides[pp_ranks]
        sides = [known.get(id(box_class)) or self._sides(box_class, pp_ranks) for _, box_class in claims]
        # `interned` keeps the pairs, so their ids stay, too.
        key = shape, tuple([(id(box), id(both)) for (box, _), both in zip(claims, sides, strict=True)])
        found = "" if key in self.known else _fault(self.pieces[shape], pp_ranks, claims, sides)
        if not found:
            self.same.add(same)
            if all(needing is not None for _, needing in sides):
                self.known.add(key)
        return found

    def _sides(self, box_class: BoxClass, pp_ranks: PPRanks) -> Sides:
        """`_pairs_on_all` of the holders and the needers of a class, one object for equal pairs."""
        found = _pairs_on_all(box_class.holders, pp_ranks[0]), _pairs_on_all(box_class.needers, pp_ranks[1])
        self.sides[pp_ranks][id(box_class)] = self.interned.setdefault(found, found)
        return self.sides[pp_ranks][id(box_class)]


class _Pieces:
    """The boxes of a parameter under a layout, found by (part, zero shard) or by what they contain."""

    def __init__(self, spec: ParamSpec, layout: Layout):
        self.by_pair = {pair: tuple(p.box for p in pieces) for pair, pieces in pieces_by_pair(spec, layout).items()}
        by_rows: dict[tuple[int, int], dict[Box, list[PartShard]]] = defaultdict(lambda: defaultdict(list))
        for pair, boxes in self.by_pair.items():
            for box in boxes:
                by_rows[box[0] if box else (0, 1)][box].append(pair)
        self.rows = sorted(by_rows.items())  # (rows, where each box with these rows is), by first row
        self.starts = [start for (start, _), _ in self.rows]
        self.reach = list(accumulate((stop for (_, stop), _ in self.rows), max))  # the largest end of rows up to here

    def holders(self, box: Box) -> Set[PartShard]:
        """Where the pieces are that contain a box."""
        start, stop = box[0] if box else (0, 1)
        pairs: set[PartShard] = set()
        at = bisect_right(self.starts, start) - 1
        while at >= 0 and self.reach[at] >= stop:
            for outer, having in self.rows[at][1].items():
                if contains(outer, box):
                    pairs.update(having)
            at -= 1
        return pairs


def _fault(pieces: tuple[_Pieces, _Pieces], pp_ranks: PPRanks, claims: Sequence[Claim], sides: Sequence[Sides]) -> str:
    """What is wrong with the boxes of one parameter; "" if nothing. pieces: of the source and the destination.
    sides: of each claim."""
    boxes_of_cell: dict[Cell, list[Box]] = defaultdict(list)
    for (box, box_class), (pairs, _) in zip(claims, sides, strict=True):
        if (right := pieces[0].holders(box)) != pairs:
            holders = {Cell(pp_rank, *pair) for pair in right for pp_rank in pp_ranks[0]}
            return f"box {box} should be held by {_cell_text(holders)}, not by {_cell_text(box_class.holders)}"
        for cell in box_class.needers:
            boxes_of_cell[cell].append(box)
    for pp_rank in pp_ranks[1]:
        for pair, needed in pieces[1].by_pair.items():
            cell = Cell(pp_rank, *pair)
            if not _divides(boxes_of_cell.pop(cell, []), needed):
                return f"cell {_cell_text([cell])} of the destination does not get its pieces once each"
    return f"cells {_cell_text(boxes_of_cell)} get what they do not need" if boxes_of_cell else ""


def _pairs_on_all(listed: Sequence[Cell], pp_ranks: Sequence[int]) -> Pairs:
    """The (part, zero shard) pairs of some cells, if these are just the same pairs on each pp rank, each cell once;
    otherwise None."""
    cells = frozenset(listed)
    pairs = frozenset([(part, zero_shard) for _, part, zero_shard in cells])
    if not len(listed) == len(cells) == len(pairs) * len({*pp_ranks}):
        return None
    # as many cells as pairs times pp ranks, all on these: so each pair is on each
    return pairs if {cell.pp_rank for cell in cells} <= {*pp_ranks} else None


def _divides(boxes: Sequence[Box], whole: Sequence[Box]) -> bool:
    """Whether `boxes` are a division of `whole`, whose boxes are disjoint."""
    for box in boxes:
        for outer in whole:
            if contains(outer, box):
                break
        else:
            return False
    return sum(map(volume, boxes)) == sum(map(volume, whole)) and not overlapping(boxes)


def overlapping(boxes: Sequence[Box]) -> bool:
    """Whether any two have something in common. Only those whose rows meet are compared."""
    ordered = sorted(boxes)
    for i, a in enumerate(ordered):
        for at in range(i + 1, len(ordered)):  # no slice: it would copy all that follow
            b = ordered[at]
            if a and b[0][0] >= a[0][1]:
                break
            if overlap(a, b):
                return True
    return False


def _cell_text(cells: Iterable[Cell]) -> str:
    return ", ".join(f"{c.pp_rank}.{c.part}" + (f".{c.zero_shard}" if c.zero_shard else "")
                     for c in sorted(cells)) or "nobody"
