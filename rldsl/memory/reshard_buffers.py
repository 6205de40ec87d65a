"""Bytes of buffers that parameters travel in.

In: a realloc of a plan and ranks that hold the same, or a copy to be saved. Out: bytes on one rank. A realloc is
executed in rounds (`reshard/rounds.py`), of which two are in flight.
"""

from __future__ import annotations

from functools import lru_cache

from rldsl.memory.holder_classes import HolderClass
from rldsl.memory.parameters import Copy, held
from rldsl.plan.events import Realloc
from rldsl.plan.model import Layout, Model, ParamSpec, Plan
from rldsl.plan.projection import event_paths
from rldsl.reshard.in_place import buffer_elements, elements_to_pack
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.reshard.reshard_cache import ReshardCache, reshard_cache
from rldsl.reshard.rounds import ROUNDS_IN_FLIGHT, like_messages, num_buckets, num_rounds
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.sharding import boxes
from rldsl.sharding.boxes import Box, Cell, Parameter, Piece, itemsize, num_parts, num_zero_shards, parameters, volume
from rldsl.sharding.dtypes import in_wire_dtypes, parameter_dtype, parameter_size, storage_dtype

ReallocKey = tuple[str, str, str, str, bool]


def realloc_key(e: Realloc) -> ReallocKey:
    """Equal for reallocs that move the same."""
    return e.model, e.origin, e.src, e.dst, e.decay > 0


def reshard_plans(plan: Plan) -> dict[ReallocKey, tuple[ReshardPlan, ...]]:
    """The reshard plans of each realloc, one for each dtype that travels (`sharding/dtypes.py`)."""
    meshes, layouts = {m.id: m for m in plan.meshes}, {x.id: x for x in plan.layouts}
    models, plans = {m.name: m for m in plan.models}, dict[ReallocKey, tuple[ReshardPlan, ...]]()
    for e, _ in event_paths(plan):
        if isinstance(e, Realloc) and realloc_key(e) not in plans:
            src, dst = layouts[e.src], layouts[e.dst]
            plans[realloc_key(e)] = tuple(
                plan_reshard(part, src, meshes[src.mesh], dst, meshes[dst.mesh], plan.header.devices_per_node)
                for part in in_wire_dtypes(models[e.origin], e.src, models[e.model], e.dst, e.decay))
    return plans


def realloc_bytes(plan: Plan, reshards: tuple[ReshardPlan, ...], e: Realloc, ranks: HolderClass) -> int:
    """The buffers of a rank, from the event until its last rounds have been waited for. Ranks that hold the same differ
    little in what they send, so the first of each range stands for the others; rounds are about equal, so those at the
    beginning, in the middle and at the end stand for all. reshards: one for each dtype that travels."""
    models = {m.name: m for m in plan.models}
    source, model = models[e.origin], models[e.model]
    layouts = tuple(next(x for x in plan.layouts if x.id == id) for id in (e.src, e.dst))
    parts = in_wire_dtypes(source, e.src, model, e.dst, e.decay)
    total = 0
    for reshard, part in zip(reshards, parts, strict=True):
        buckets = num_buckets(reshard, itemsize(part))
        src, dst = (parameter_dtype(part.params[0], storage_dtype(*x)) for x in ((source, e.src), (model, e.dst)))
        in_place = src == part.dtype, dst == part.dtype and not e.decay
        total += itemsize(part) * max(_buffered_elements(reshard, rank, buckets, part, layouts, in_place)
                                      for rank, _ in ranks.ranks)
    return total


@lru_cache(maxsize=1024)
def _buffered_elements(reshard: ReshardPlan, rank: int, buckets: int, model: Model, layouts: tuple[Layout, ...],
                       in_place: tuple[bool, bool]) -> int:
    """Elements in the buffers of one rank. in_place: whether source and destination are in the dtype of the wire; a
    contiguous part is then sent from, and received into, the parameter itself, without a buffer. Cached, since the
    verifier estimates what the compiler has estimated."""
    total = num_rounds(reshard, buckets)
    starts = (0, total // 2, total - ROUNDS_IN_FLIGHT)
    numbers = sorted({n for start in starts for n in range(start, start + ROUNDS_IN_FLIGHT) if 0 <= n < total})
    shared, sizes = reshard_cache(reshard), dict[int, tuple[int, int]]()
    cells = reshard.src.cell(rank), reshard.dst.cell(rank)
    held = [_PiecesOfCell(model, layout, cell) if same else None
            for same, layout, cell in zip(in_place, layouts, cells, strict=True)]
    slices = rank_slices(reshard, rank, shared)
    alike = tuple(_AlikeAtCell(shared, way, cell) for way, cell in enumerate(cells))
    for number in numbers:
        sends, receives = (sum(x.count * elements_to_pack((x.message,), held[way])
                               for x in like_messages(reshard, slices[way], number, buckets, alike[way]))
                           for way in (0, 1))
        sizes[number] = sends, receives
    return sum(sum(buffer_elements(sizes.get(n, (0, 0))[way] for n in range(total))) for way in (0, 1))


class _AlikeAtCell(dict[int, int]):
    """Of each box class a number: equal for classes that take equal buffers on the ranks at a cell. A box lies in a
    parameter of such a rank if the cell is one of its class, and nowhere else, so classes with the same boxes, all of
    this cell or none, need the same. way: 0 for what the rank sends, 1 for what it receives."""

    def __init__(self, shared: ReshardCache, way: int, cell: Cell | None):
        super().__init__()
        self.shared, self.way, self.cell = shared, way, cell

    def __missing__(self, number: int) -> int:
        box_class = self.shared.plan.classes[number]
        here = self.cell in (box_class.holders, box_class.needers)[self.way]
        self[number] = 2 * self.shared.alike[number] + here
        return self[number]


class _PiecesOfCell(dict[str, tuple[Parameter, tuple[Piece, ...]]]):
    """What the ranks at a cell hold of a parameter, computed when it is first asked for: a few rounds ask about few."""

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
    """Bytes of the complete parameters that a rank writes, and of what it sends and receives to complete them.
    Parameters are divided evenly over the ranks that write them."""
    count = num_parts(copy.layout) * num_zero_shards(copy.layout)
    ranks = copy.layout.dp * copy.layout.cp * copy.layout.tp
    sizes = {p: parameter_size(p, copy.stored) * _volume(p) for p in copy.model.params}
    complete = sum(len(held(p, copy)) * size for p, size in sizes.items())  # of which this rank holds a part
    own = max(complete // ranks, max((size for p, size in sizes.items() if held(p, copy)), default=0))
    if copy.model.lora is not None:  # one file of one rank
        own = sum(size * max(1, len(p.layer_numbers(copy.model.layers))) for p, size in sizes.items())
    return own + 2 * own * (count - 1) // count


def _volume(p: ParamSpec) -> int:
    box: Box = tuple((0, n) for n in p.shape)
    return volume(box)
