"""Which part of each parameter a rank holds, as boxes of the global tensor.

In: a `Model`'s parameter specs and a layout. Out: for a rank, the `Piece`s that make up its local tensor.
Invariant: under every layout the pieces of all ranks cover each parameter; the pieces of one rank do not overlap, and
joined in order along the split dimension they are its local tensor.

`zero` plays no part: it shards training state, never the parameters that calls see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from rldsl.plan.layout import coordinate, degree_product, layer_stage
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec

Box = tuple[tuple[int, int], ...]  # [start, stop) for each dimension of the global tensor


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


@dataclass(frozen=True, slots=True)
class Share:
    """The same pieces on every one of `ranks`."""

    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...]


def parameters(model: Model) -> Iterator[Parameter]:
    """Every parameter that has versions: spec by spec, layer by layer."""
    return each(model.params, model.layers)


def each(specs: Iterable[ParamSpec], layers: int) -> Iterator[Parameter]:
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


def stages(parameter: Parameter, layers: int, pp: int) -> tuple[int, ...]:
    """The pipeline stages that hold a parameter of a model with `layers` layers."""
    match parameter.spec.stage:
        case "first":
            return (0,)
        case "last":
            return (pp - 1,)
        case "ends":
            return (0,) if pp == 1 else (0, pp - 1)
        case "layer":
            assert parameter.layer is not None, f"{parameter.name} belongs to no layer"
            return (layer_stage(layers, pp, parameter.layer),)
        case _:
            return tuple(range(pp))


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


def holding(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> tuple[Piece, ...]:
    """What `rank` holds of a parameter; empty if nothing. layers: of the model."""
    if rank not in mesh.members():
        return ()
    at = coordinate(layout, mesh, rank)
    return pieces(parameter.spec, layout.tp, at.tp) if at.pp in stages(parameter, layers, layout.pp) else ()


def shares(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh) -> tuple[Share, ...]:
    """All holders of a parameter, those with equal pieces together. The same as asking `holding` for every rank."""
    members = mesh.members()
    assert degree_product(layout) == len(members), f"layout {layout.id} does not fill mesh {mesh.id}"
    ranks: dict[tuple[Piece, ...], list[int]] = {}
    stage_size = layout.dp * layout.cp * layout.tp
    for tp in range(layout.tp):
        same = ranks.setdefault(pieces(parameter.spec, layout.tp, tp), [])
        for stage in stages(parameter, layers, layout.pp):
            same.extend(members[stage * stage_size + tp : (stage + 1) * stage_size : layout.tp])
    return tuple(Share(held, tuple(sorted(found))) for held, found in ranks.items())


def replicas(parameter: Parameter, layers: int, layout: Layout, mesh: Mesh, rank: int) -> int:
    """How many ranks of the mesh hold exactly the pieces that `rank` holds; 0 if it holds none."""
    return next((len(s.ranks) for s in shares(parameter, layers, layout, mesh) if rank in s.ranks), 0)


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
    return tuple(slice(start + s, stop + s) for (start, stop), s in zip(box, shift))


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
    for d, ((start, stop), (low, high)) in enumerate(zip(a, common)):
        for part in ((start, low), (high, stop)):
            if part[0] < part[1]:
                rest.append(common[:d] + (part,) + a[d + 1 :])
    return tuple(rest)
