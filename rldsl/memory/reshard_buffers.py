"""Bytes of buffers that parameters travel in.

In: a plan's reallocation and ranks that hold the same, or a copy to be saved. Out: bytes on one rank. A reallocation
goes in rounds (`reshard/rounds.py`), of which two are under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

from rldsl.memory.holder_classes import HolderClass
from rldsl.memory.parameters import Copy, held
from rldsl.plan.events import Realloc
from rldsl.plan.model import Layout, Model, ParamSpec, Plan
from rldsl.plan.projection import events
from rldsl.reshard.in_place import Held, buffer_elements, is_contiguous, packed_elements
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, num_buckets, num_rounds, selected_rounds
from rldsl.reshard.transfer_slices import ReshardCache
from rldsl.sharding import boxes
from rldsl.sharding.boxes import (
    Box,
    Cell,
    Parameter,
    Piece,
    cell_of,
    itemsize,
    num_parts,
    num_zero_shards,
    parameters,
    volume,
)
from rldsl.sharding.dtypes import in_wire_dtype, storage_dtype


def reshard_routes(plan: Plan) -> dict[tuple[str, str, str], ReshardPlan]:
    """How each reallocation of a plan goes, by model and layouts."""
    meshes, layouts = {m.id: m for m in plan.meshes}, {x.id: x for x in plan.layouts}
    models, found = {m.name: m for m in plan.models}, {}
    for e, _ in events(plan):
        if isinstance(e, Realloc) and (e.model, e.src, e.dst) not in found:
            src, dst = layouts[e.src], layouts[e.dst]
            found[e.model, e.src, e.dst] = plan_reshard(models[e.model], src, meshes[src.mesh], dst, meshes[dst.mesh],
                                                 plan.header.devices_per_node)
    return found


def realloc_bytes(plan: Plan, way: ReshardPlan, e: Realloc, ranks: HolderClass) -> int:
    """The buffers of a rank, from the event until its last rounds have been waited for. Ranks that hold the same differ
    little in what they send, so the first of each range stands for the others; rounds are about equal, so those at the
    beginning, in the middle and at the end stand for all."""
    models = {m.name: m for m in plan.models}
    source, model = models[e.source or e.model], models[e.model]
    travels = in_wire_dtype(source, e.src, model, e.dst, e.decay)
    parts = num_buckets(way, itemsize(travels))
    total = num_rounds(way, parts)
    starts = (0, total // 2, total - ROUNDS_IN_FLIGHT)
    numbers = sorted({n for start in starts for n in range(start, start + ROUNDS_IN_FLIGHT) if 0 <= n < total})
    found, known = 0, ReshardCache(way)
    for rank, _ in ranks.ranks:
        # what lies in one piece, in the dtype that travels, is sent from and received into its place, without a buffer
        in_place = (partial(_in_place, storage_dtype(source, e.src) == travels.dtype, _held(plan, model, e.src, rank)),
                    partial(_in_place, storage_dtype(model, e.dst) == travels.dtype and not e.decay,
                            _held(plan, model, e.dst, rank)))
        rounds = selected_rounds(way, rank, parts, numbers, known)
        sizes = {number: packed_elements(ops, in_place) for number, ops in zip(numbers, rounds, strict=True)}
        each_side = (sum(buffer_elements(sizes.get(n, (0, 0))[side] for n in range(total))) for side in (0, 1))
        found = max(found, sum(each_side))
    return itemsize(travels) * found


def _in_place(same_dtype: bool, held_: Held, part: Any) -> bool:
    return same_dtype and is_contiguous(part, held_)


def _held(plan: Plan, model: Model, at: str, rank: int) -> Held:
    layout = next(x for x in plan.layouts if x.id == at)
    mesh = next(m for m in plan.meshes if m.id == layout.mesh)
    return _There(model, layout, cell_of(layout, mesh, rank))


class _There(dict[str, tuple[Parameter, tuple[Piece, ...]]]):
    """What the ranks at a cell hold of a parameter, worked out when it is asked for: a few rounds ask about few."""

    def __init__(self, model: Model, layout: Layout, at: Cell | None):
        self.model, self.layout, self.at = model, layout, at
        self.by_name = _parameters_by_name(model)

    def __missing__(self, name: str) -> tuple[Parameter, tuple[Piece, ...]]:
        p = self.by_name[name]
        self[name] = p, boxes.pieces_of_cell(p, self.model.layers, self.layout, self.at)
        return self[name]


@lru_cache(maxsize=64)
def _parameters_by_name(model: Model) -> dict[str, Parameter]:
    return {p.name: p for p in parameters(model)}


def saved_bytes(copy: Copy) -> int:
    """Bytes of the parameters that a rank writes, whole, and of what it sends and receives until all are whole.
    Parameters are spread evenly over the ranks that write them."""
    count = num_parts(copy.layout) * num_zero_shards(copy.layout)
    ranks = copy.layout.dp * copy.layout.cp * copy.layout.tp
    here = [p for p in copy.model.params if _whole((p,), copy)]
    own = max(_whole(here, copy) // ranks, max((_volume(p) for p in here), default=0))
    if copy.model.lora is not None:  # one file of one rank
        own = sum(_volume(p) * (p.layers or copy.model.layers if p.stage == "layer" else 1) for p in copy.model.params)
    return copy.stored * (own + 2 * own * (count - 1) // count)


def _whole(specs: Iterable[ParamSpec], copy: Copy) -> int:
    """Elements of parameters of which this rank holds a part."""
    return sum(len(held(p, copy)) * _volume(p) for p in specs)


def _volume(p: ParamSpec) -> int:
    box: Box = tuple((0, n) for n in p.shape)
    return volume(box)
