"""Which part of each parameter a rank holds, as boxes of the global tensor.

In: a `Model`'s parameter specs and a layout. Out: for a rank, the `Piece`s that make up its local tensor.
Invariant: under every layout the pieces of all ranks cover each parameter; the pieces of one rank do not overlap, and
joined in order along the split dimension they are its local tensor.

Under a layout with `ep` dimension 0 of what belongs to experts is divided too, evenly over runs of ep ranks of dp.

Under a layout with `zero` the local tensor is divided once more, over the ranks of dp that would hold the same: each
holds an even run of the rows (dimension 0), of ceil(rows / ranks); the last may hold fewer, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec
from rldsl.sharding.layout import coordinate, degree_product, layer_stage

Box = tuple[tuple[int, int], ...]  # [start, stop) for each dimension of the global tensor


class Cell(NamedTuple):  # hashed more often than anything else of a plan
    """What decides the boxes that a rank holds: all ranks of a layout at one cell hold the same. stage: along pp, which
    with `vpp` is a rank's place in the pipeline and not one run of layers. part: ep * tp of them,
    tp fastest. shard: of the rows of that part, over dp / ep; 0 without `zero`."""

    stage: int
    part: int
    shard: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a rank holds, and where it begins in the local tensor along the split dimension."""

    box: Box
    offset: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model. layer: which one, for a spec that stands for all layers; else None."""

    name: str
    spec: ParamSpec
    layer: int | None

    @property
    def dim(self) -> int:
        """The dimension along which local tensors have pieces one after the other."""
        return self.spec.split.dim if self.spec.split else 0


@dataclass(frozen=True, slots=True)
class Holding:
    """The same pieces on every one of `ranks`."""

    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...]


def parameters(model: Model) -> Iterator[Parameter]:
    """Every parameter that has versions: spec by spec, layer by layer."""
    return expand_specs(model.params, model.layers)


def expand_specs(specs: Iterable[ParamSpec], layers: int) -> Iterator[Parameter]:
    """The parameters of some specs of a model with `layers` layers."""
    for spec in specs:
        if "{}" in spec.name:
            for layer in range(spec.layers or layers):
                yield Parameter(spec.name.replace("{}", str(layer), 1), spec, layer)
        else:
            yield Parameter(spec.name, spec, None)


def itemsize(model: Model) -> int:
    """Bytes of one element of the model's parameters."""
    return {"float32": 4, "bfloat16": 2}[model.dtype]


def chunks(parameter: Parameter, layers: int, count: int) -> tuple[int, ...]:
    """Which of `count` runs of consecutive layers, all layers of a model, have a parameter."""
    match parameter.spec.stage:
        case "first":
            return (0,)
        case "last":
            return (count - 1,)
        case "ends":
            return (0,) if count == 1 else (0, count - 1)
        case "layer":
            assert parameter.layer is not None, f"{parameter.name} belongs to no layer"
            return (layer_stage(layers, count, parameter.layer),)
        case _:
            return tuple(range(count))


def stages(parameter: Parameter, layers: int, layout: Layout) -> tuple[int, ...]:
    """The coordinates along pp that hold a parameter of a model with `layers` layers, ascending."""
    pp = layout.pp
    return tuple(dict.fromkeys(chunk % pp for chunk in chunks(parameter, layers, pp * layout.vpp)))


@cache
def pieces(spec: ParamSpec, tp: int, index: int) -> tuple[Piece, ...]:
    """The pieces of position `index` of `tp`: one for each part of the split, joined where they touch. A part of U
    units gives it the units [index*U//tp, (index+1)*U//tp), or the single unit index*U//tp when U < tp."""
    if spec.split is None:
        return (Piece(tuple((0, n) for n in spec.shape), 0),)
    dim = spec.split.dim
    runs: list[tuple[int, int]] = []
    origin = 0
    for units, size in spec.split.parts:
        first = index * units // tp
        last = (index + 1) * units // tp if tp <= units else first + 1
        run = (origin + first * size, origin + last * size)
        if runs and runs[-1][1] == run[0]:
            run = (runs.pop()[0], run[1])
        runs.append(run)
        origin += units * size
    assert origin == spec.shape[dim], f"{spec.name}: parts fill {origin} of {spec.shape[dim]} along dimension {dim}"
    found, offset = [], 0
    for run in runs:
        found.append(Piece(tuple(run if d == dim else (0, n) for d, n in enumerate(spec.shape)), offset))
        offset += run[1] - run[0]
    return tuple(found)


def num_parts(layout: Layout) -> int:
    """Into how many parts a layout divides parameters, by heads, columns, rows or experts."""
    return layout.tp * layout.ep


def num_shards(layout: Layout) -> int:
    """Into how many runs of rows a layout divides its parts."""
    return layout.dp // layout.ep if layout.zero else 1


def cut_rows(spec: ParamSpec, whole: tuple[Piece, ...], count: int, shard: int) -> tuple[Piece, ...]:
    """The rows of shard `shard` of `count` of the local tensor that `whole` makes up. What has no dimensions is the
    first one's."""
    if count == 1 or not spec.shape:
        return () if shard else whole
    along = spec.split is not None and spec.split.dim == 0
    ends = [(p.offset, p.offset + p.box[0][1] - p.box[0][0]) if along else p.box[0] for p in whole]
    size = -(-max(stop for _, stop in ends) // count)
    low, high = shard * size, (shard + 1) * size
    found = []
    for piece, (start, stop) in zip(whole, ends, strict=True):
        first, past = max(start, low), min(stop, high)
        if first < past:
            shift = piece.box[0][0] - start
            found.append(Piece(((first + shift, past + shift), *piece.box[1:]),
                               first - low if along else piece.offset))
    return tuple(found)


def part_shards(layout: Layout) -> Iterator[tuple[int, int]]:
    """Every (part, shard) of a layout, ascending."""
    return product(range(num_parts(layout)), range(num_shards(layout)))


def cells(layout: Layout, stage: int) -> Iterator[Cell]:
    """Those of a pipeline stage, ascending."""
    return (Cell(stage, *place) for place in part_shards(layout))


def pieces_at(spec: ParamSpec, layout: Layout, part: int, shard: int) -> tuple[Piece, ...]:
    """What the ranks at (part, shard) hold of a parameter, on the stages that have it. The one place that says what a
    layout means for boxes."""
    expert, index = divmod(part, layout.tp)
    whole, count = pieces(spec, layout.tp, index), num_shards(layout)
    if layout.ep == 1:
        return cut_rows(spec, whole, count, shard)
    if not spec.experts:
        return cut_rows(spec, whole, layout.dp if layout.zero else 1, shard * layout.ep + expert if layout.zero else 0)
    assert spec.experts % layout.ep == 0, f"{spec.name}: {spec.experts} experts over ep={layout.ep}"
    own = spec.experts // layout.ep
    size = -(-own // count)
    first = expert * own + shard * size
    rows = (first, min(first + size, (expert + 1) * own))
    return tuple(Piece((rows, *p.box[1:]), p.offset) for p in whole) if rows[0] < rows[1] else ()


def cell_of(layout: Layout, mesh: Mesh, rank: int) -> Cell | None:
    """Where `rank` stands; None outside the mesh."""
    if rank not in mesh.members():
        return None
    at = coordinate(layout, mesh, rank)
    run, expert = divmod(at.dp, layout.ep)
    return Cell(at.pp, expert * layout.tp + at.tp, run if layout.zero else 0)


def pieces_of_cell(parameter: Parameter, layers: int, layout: Layout, at: Cell | None) -> tuple[Piece, ...]:
    """What a rank at a cell holds of a parameter; empty if nothing. layers: of the model."""
    if at is None or at.stage not in stages(parameter, layers, layout):
        return ()
    return pieces_at(parameter.spec, layout, at.part, at.shard)


def pieces_of_rank(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """What `rank` holds of a parameter; empty if nothing. For many parameters, ask `cell` once and then `held`."""
    return pieces_of_cell(parameter, layers, layout, cell_of(layout, mesh, rank))


def holdings(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh) -> tuple[Holding, ...]:
    """All holders of a parameter, those with equal pieces together. The same as asking `holding` for every rank."""
    members = mesh.members()
    assert degree_product(layout) == len(members), f"layout {layout.id} does not fill mesh {mesh.id}"
    ranks: dict[tuple[Piece, ...], list[int]] = {}
    stage_size = layout.dp * layout.cp * layout.tp
    block = stage_size // num_shards(layout)
    for part, shard in part_shards(layout):
        same = ranks.setdefault(pieces_at(parameter.spec, layout, part, shard), [])
        for stage in stages(parameter, layers, layout):
            first = stage * stage_size + shard * block
            same.extend(members[first + part : first + block : num_parts(layout)])
    return tuple(Holding(held, tuple(sorted(found))) for held, found in ranks.items() if held)


def replicas(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> int:
    """How many ranks of the mesh hold exactly the pieces that `rank` holds; 0 if it holds none."""
    return next((len(s.ranks) for s in holdings(parameter, layers, layout, mesh) if rank in s.ranks), 0)


def local_shape(parameter: Parameter, pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Shape of the local tensor that `pieces` make up."""
    assert pieces, f"no pieces of {parameter.name}"
    shape = [stop - start for start, stop in pieces[0].box]
    if parameter.spec.split is not None:
        dim = parameter.spec.split.dim
        shape[dim] = sum(p.box[dim][1] - p.box[dim][0] for p in pieces)
    return tuple(shape)


def local_slice(piece: Piece, box: Box, dim: int) -> tuple[slice, ...]:
    """Where `box`, a part of `piece`, lies in the local tensor. dim: the split dimension (any, if there is none)."""
    assert contains(piece.box, box), f"{box} is not inside {piece.box}"
    shift = [(piece.offset if d == dim else 0) - start for d, (start, _) in enumerate(piece.box)]
    return tuple(slice(start + s, stop + s) for (start, stop), s in zip(box, shift, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Where a box lies in the whole tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where `inner` lies in a tensor that holds just `outer`."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(inner, outer, strict=True))


def volume(box: Box) -> int:
    """Number of elements."""
    return prod(stop - start for start, stop in box)


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, or None where there is none."""
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def subtract(a: Box, b: Box) -> tuple[Box, ...]:
    """`a` without `b`, as disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return (a,)
    rest: list[Box] = []
    for d, ((start, stop), (low, high)) in enumerate(zip(a, common, strict=True)):
        for part in ((start, low), (high, stop)):
            if part[0] < part[1]:
                rest.append(common[:d] + (part,) + a[d + 1 :])
    return tuple(rest)
