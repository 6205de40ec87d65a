"""Which parameters of a model this rank holds and, under `zero`, how modules get complete ones.

In: a model of the plan, a layout and this rank's place in it. Out: the pieces of each parameter, and the groups that
`zero.py` gathers and reduces.
Invariant: pieces are exactly those that `sharding/boxes.py` gives this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from rldsl.backends.torch.model.load_weights import HeldPieces
from rldsl.backends.torch.model.zero import ParamGroup, ParamGroups, ZeroSharding
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes
from rldsl.sharding.boxes import Parameter, expand_specs, parameters, pieces_of_rank


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's pieces of a model's parameters, by HuggingFace name."""

    stored: HeldPieces     # of parameters that have versions
    unsharded: HeldPieces  # the same as if the layout had no `zero`
    base: HeldPieces       # of parameters that never change (a base under adapters)


def held_here(model: Model, layout: Layout, mesh: Mesh, axes: Axes) -> Held:
    """The pieces that the layout gives this rank."""
    rank, without_zero = axes.mesh.ranks[axes.mesh.index], replace(layout, zero=0)

    def held(wanted: Iterable[Parameter]) -> HeldPieces:
        pieces = ((p, pieces_of_rank(p, model.layers, without_zero, mesh, rank)) for p in wanted)
        return {p.name: (p, found) for p, found in pieces if found}

    unsharded = held(parameters(model))
    stored = {name: (p, pieces_of_rank(p, model.layers, layout, mesh, rank))
              for name, (p, _) in unsharded.items()} if layout.zero else unsharded
    return Held(stored, unsharded, held(expand_specs(model.base, model.layers)))


def is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix, or a stack of them, of a layer."""
    return parameter.layer is not None and len(parameter.spec.shape) > 1


def rounds_grad(name: str, parameter: Parameter, matmul_dtype: torch.dtype, float32_products: frozenset[str]) -> bool:
    """Whether the gradient of a pass is a bfloat16 number: of what is multiplied in bfloat16."""
    return matmul_dtype == torch.bfloat16 and (is_matrix(parameter) or name == SCORE_WEIGHT) and \
        name.rpartition(".")[0] not in float32_products


def zero_sharding(level: int, held: HeldPieces, stored: Mapping[str, nn.Parameter],
                  unsharded: Mapping[str, nn.Parameter], axes: Axes, in_leaves: bool,
                  rounds: Callable[[str], bool]) -> ZeroSharding:
    """The parameters of a layout with `zero`: a group for each layer, and one for those outside layers. Experts are
    divided only over the ranks that hold the same ones.

    stored, unsharded: the rows of this rank, and what modules compute with. in_leaves: whether gradients are summed
    leaf by leaf. rounds: whether the gradient of a parameter is a bfloat16 number."""
    def group(layer: int | None, experts: bool) -> ParamGroup | None:
        names = [n for n, (p, _) in held.items()
                 if p.layer == layer and experts == (axes.ep.size > 1 and p.spec.experts > 0)]
        if not names:
            return None
        return ParamGroup([stored[n] for n in names], [unsharded[n] for n in names],
                          axes.expert_dp if experts else axes.dp, in_leaves, [rounds(n) for n in names])

    def groups(layer: int | None) -> ParamGroup | ParamGroups:
        found = [g for experts in (False, True) if (g := group(layer, experts)) is not None]
        return found[0] if len(found) == 1 else ParamGroups(found)

    layers = {p.layer for p, _ in held.values()}
    return ZeroSharding(level, {x: groups(x) for x in sorted(x for x in layers if x is not None)},
                        [groups(None)] if None in layers else [], in_leaves)
