"""Which part of each parameter a rank holds, as boxes of the global tensor.

In: a `Model`'s parameter specs and a layout. Out: for a rank, the `Piece`s that make up its local tensor.
Invariant: under every layout the pieces of all ranks cover each parameter; the pieces of one rank do not overlap, and
joined in order along the split dimension they are its local tensor.

Under a layout with `ep` dimension 0 of what belongs to experts is divided too, evenly over runs of ep ranks of dp.

Under a layout with `zero` the local tensor is divided once more, over the ranks of dp that would hold the same: each
holds an even run of the rows (dimension 0), of ceil(rows / ranks); the last may hold fewer, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec
from rldsl.sharding.layout import check_mesh, coordinate, layer_stage

Box = tuple[tuple[int, int], ...]  # [start, stop) for each dimension of the global tensor


class Cell(NamedTuple):  # a tuple, since cells are hashed more often than anything else of a plan
    """What decides the boxes that a rank holds: all ranks of a layout at one cell hold the same parameters."""

    pp_rank: int  # coordinate along pp; with `vpp` such a rank has several runs of layers
    part: int  # (ep, tp) coordinate: expert coordinate * tp + tp coordinate
    zero_shard: int = 0  # which of the runs of rows into which `zero` divides a part, over dp / ep; 0 without `zero`


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a rank holds, and where it begins in the local tensor along the split dimension."""

    box: Box  # of the global tensor
    offset: int  # along the split dimension


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model."""

    name: str  # dotted, with the number of its layer
    spec: ParamSpec  # of the parameter
    layer: int | None  # of a spec that stands for all layers; None for any other

    @property
    def dim(self) -> int:
        """The dimension along which local tensors have pieces one after the other."""
        return self.spec.split.dim if self.spec.split else 0


@dataclass(frozen=True, slots=True)
class Holding:
    """The same pieces on every one of `ranks`."""

    pieces: tuple[Piece, ...]  # in order
    ranks: tuple[int, ...]  # ascending


def parameters(model: Model) -> Iterator[Parameter]:
    """Every parameter that has versions: spec by spec, layer by layer."""
    return expand_specs(model.params, model.layers)


def expand_specs(specs: Iterable[ParamSpec], layers: int) -> Iterator[Parameter]:
    """The parameters of some specs of a model with `layers` layers."""
    for spec in specs:
        for layer in spec.layer_numbers(layers):
            yield Parameter(spec.name.replace("{}", str(layer), 1), spec, layer)
        if spec.stage != "layer":
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
            if parameter.layer is None:
                raise internal_error(f"{parameter.name} belongs to no layer", place="boxes")
            return (layer_stage(layers, count, parameter.layer),)
        case _:
            return tuple(range(count))


def stages(parameter: Parameter, layers: int, layout: Layout) -> tuple[int, ...]:
    """The coordinates along pp that hold a parameter of a model with `layers` layers, ascending. With `vpp`, chunk c
    is on coordinate c % pp."""
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
    if origin != spec.shape[dim]:
        raise internal_error(f"{spec.name}: parts fill {origin} of {spec.shape[dim]} along dimension {dim}",
                             place="boxes")
    result, offset = [], 0
    for run in runs:
        result.append(Piece(tuple(run if d == dim else (0, n) for d, n in enumerate(spec.shape)), offset))
        offset += run[1] - run[0]
    return tuple(result)


def num_parts(layout: Layout) -> int:
    """Into how many parts a layout divides parameters by tp and ep: by heads, columns, rows or experts."""
    return layout.tp * layout.ep


def num_zero_shards(layout: Layout) -> int:
    """Into how many runs of rows a layout divides each part by `zero`."""
    return layout.dp // layout.ep if layout.zero else 1


def cut_rows(spec: ParamSpec, pieces: tuple[Piece, ...], count: int, index: int) -> tuple[Piece, ...]:
    """Run `index` of the `count` equal runs of rows of a local tensor, which `pieces` make up. A parameter without
    dimensions belongs to the first run."""
    if count == 1 or not spec.shape:
        return () if index else pieces
    # rows of the local tensor; if it is split along its rows, the pieces are stacked by their offsets
    stacked = spec.split is not None and spec.split.dim == 0
    rows = [(p.offset, p.offset + p.box[0][1] - p.box[0][0]) if stacked else p.box[0] for p in pieces]
    size = -(-max(stop for _, stop in rows) // count)
    low, high = index * size, (index + 1) * size
    result = []
    for piece, (start, stop) in zip(pieces, rows, strict=True):
        first, past = max(start, low), min(stop, high)
        if first < past:
            shift = piece.box[0][0] - start  # from rows of the local tensor to rows of the parameter
            result.append(Piece(((first + shift, past + shift), *piece.box[1:]),
                                first - low if stacked else piece.offset))
    return tuple(result)


def part_shard_pairs(layout: Layout) -> Iterator[tuple[int, int]]:
    """Every (part, zero shard) of a layout, ascending."""
    return product(range(num_parts(layout)), range(num_zero_shards(layout)))


def cells(layout: Layout, pp_rank: int) -> Iterator[Cell]:
    """The cells at a coordinate along pp, ascending."""
    return (Cell(pp_rank, *pair) for pair in part_shard_pairs(layout))


def pieces_at(spec: ParamSpec, layout: Layout, part: int, zero_shard: int) -> tuple[Piece, ...]:
    """What the ranks at (part, zero shard) hold of a parameter, if their coordinate along pp has it. Everything that a
    layout means for boxes is defined here, and only here."""
    # Example: dp=4 ep=2 zero=1 tp=2. part = expert * tp + tp coordinate, so there are 4 parts, and each is cut into
    # dp / ep = 2 zero shards. A tensor that does not belong to experts is the same in both expert coordinates, so there
    # all dp=4 ranks share its rows: its run of rows is zero_shard * ep + expert, of 4.
    expert, tp_rank = divmod(part, layout.tp)
    local, count = pieces(spec, layout.tp, tp_rank), num_zero_shards(layout)
    if layout.ep == 1:
        return cut_rows(spec, local, count, zero_shard)
    if not spec.experts:
        return cut_rows(spec, local, layout.dp if layout.zero else 1,
                        zero_shard * layout.ep + expert if layout.zero else 0)
    if spec.experts % layout.ep:
        raise internal_error(f"{spec.name}: {spec.experts} experts cannot be divided by ep={layout.ep}", place="boxes")
    # dimension 0 of an expert tensor counts experts: those of this coordinate along ep, cut by zero
    local_experts = spec.experts // layout.ep
    size = -(-local_experts // count)
    first = expert * local_experts + zero_shard * size
    rows = (first, min(first + size, (expert + 1) * local_experts))
    return tuple(Piece((rows, *p.box[1:]), p.offset) for p in local) if rows[0] < rows[1] else ()


def geometry(spec: ParamSpec) -> ParamSpec:
    """What decides the boxes of a parameter under a layout, without its name and stage: equal for two parameters only
    if they have the same pieces everywhere."""
    pieces(spec, 1, 0)  # if its parts do not make it up, the error has its name
    return ParamSpec("", spec.shape, split=spec.split, experts=spec.experts)


def bare_layout(layout: Layout) -> Layout:
    """What decides the boxes of a coordinate along pp: mesh, pipeline, cp and names make no difference."""
    return Layout("", "", dp=layout.dp, tp=layout.tp, pp=1, ep=layout.ep, zero=min(layout.zero, 1))


def pieces_by_pair(spec: ParamSpec, layout: Layout) -> Mapping[tuple[int, int], tuple[Piece, ...]]:
    """What `pieces_at` says for each (part, zero shard) of a layout. Cached."""
    return _pieces_by_pair(geometry(spec), bare_layout(layout))


@lru_cache(maxsize=1024)
def _pieces_by_pair(spec: ParamSpec, layout: Layout) -> Mapping[tuple[int, int], tuple[Piece, ...]]:
    return MappingProxyType({pair: pieces_at(spec, layout, *pair) for pair in part_shard_pairs(layout)})


def cell_of(layout: Layout, mesh: Mesh, rank: int) -> Cell | None:
    """The cell of `rank`; None outside the mesh."""
    if rank not in mesh.members():
        return None
    at = coordinate(layout, mesh, rank)
    zero_shard, expert = divmod(at.dp, layout.ep)
    return Cell(at.pp, expert * layout.tp + at.tp, zero_shard if layout.zero else 0)


def pieces_of_cell(parameter: Parameter, layers: int, layout: Layout, at: Cell | None) -> tuple[Piece, ...]:
    """What a rank at a cell holds of a parameter; empty if nothing. layers: of the model."""
    if at is None or at.pp_rank not in stages(parameter, layers, layout):
        return ()
    return pieces_at(parameter.spec, layout, at.part, at.zero_shard)


def pieces_of_rank(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """What `rank` holds of a parameter; empty if nothing. For many parameters, ask `cell_of` once and
    then `pieces_of_cell`."""
    return pieces_of_cell(parameter, layers, layout, cell_of(layout, mesh, rank))


def holdings(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh) -> tuple[Holding, ...]:
    """All holders of a parameter, grouped by what they hold: `pieces_of_rank` for every rank of the mesh, at less
    cost."""
    members = mesh.members()
    check_mesh(layout, mesh)
    ranks: dict[tuple[Piece, ...], list[int]] = {}
    stage_size = layout.dp * layout.cp * layout.tp
    block = stage_size // num_zero_shards(layout)
    # the ranks at one coordinate along pp: a block for each zero shard, in which part varies fastest
    for part, zero_shard in part_shard_pairs(layout):
        holders = ranks.setdefault(pieces_at(parameter.spec, layout, part, zero_shard), [])
        for pp_rank in stages(parameter, layers, layout):
            first = pp_rank * stage_size + zero_shard * block
            holders.extend(members[first + part : first + block : num_parts(layout)])
    return tuple(Holding(held, tuple(sorted(holders))) for held, holders in ranks.items() if held)


def replicas(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> int:
    """How many ranks of the mesh hold exactly the pieces that `rank` holds; 0 if it holds none."""
    return next((len(s.ranks) for s in holdings(parameter, layers, layout, mesh) if rank in s.ranks), 0)


def first_holder(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> int | None:
    """The smallest rank of the mesh that holds exactly the pieces that `rank` holds; None if it holds none."""
    return next((s.ranks[0] for s in holdings(parameter, layers, layout, mesh) if rank in s.ranks), None)


def local_shape(parameter: Parameter, pieces: tuple[Piece, ...]) -> tuple[int, ...]:
    """Shape of the local tensor that `pieces`, at least one, make up."""
    if not pieces:
        raise internal_error(f"a rank that holds nothing of {parameter.name} has no local tensor of it", place="boxes")
    shape = [stop - start for start, stop in pieces[0].box]
    if parameter.spec.split is not None:
        dim = parameter.spec.split.dim
        shape[dim] = sum(p.box[dim][1] - p.box[dim][0] for p in pieces)
    return tuple(shape)


def local_slice(piece: Piece, box: Box, dim: int) -> tuple[slice, ...]:
    """Where `box`, a part of `piece`, lies in the local tensor. dim: the split dimension (any, if there is none)."""
    if not contains(piece.box, box):
        raise internal_error(f"{box} is not inside {piece.box}", place="boxes")
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
    size = 1
    for start, stop in box:
        size *= stop - start
    return size


def contains(outer: Box, inner: Box) -> bool:
    for (low, high), (start, stop) in zip(outer, inner, strict=True):  # noqa: SIM110  # `all` takes three times as long
        if start < low or stop > high:
            return False
    return True


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, or None where there is none."""
    both: list[tuple[int, int]] = []
    for (p, q), (r, s) in zip(a, b, strict=True):
        start, stop = max(p, r), min(q, s)
        if start >= stop:
            return None
        both.append((start, stop))
    return tuple(both)


def overlap(a: Box, b: Box) -> bool:
    """Whether two boxes have a common part."""
    for (p, q), (r, s) in zip(a, b, strict=True):  # noqa: SIM110  # `all` takes three times as long
        if p >= s or r >= q or p >= q or r >= s:
            return False
    return True


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
