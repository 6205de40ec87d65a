"""Every parameter whole on one rank, for saving.

In: a model under a layout. Out: an owner for each parameter, and the messages of one rank that bring it what it lacks.
The other parts come from the owner's own tensor-parallel group, so nothing leaves the node where such groups fit into
nodes, and no rank sends more than its part. Where zero divides rows over dp, they come from the owner's stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec
from rldsl.reshard.node_groups import MeshView
from rldsl.reshard.rounds import Message
from rldsl.sharding.boxes import (
    Box,
    Cell,
    Parameter,
    bare_layout,
    cells,
    contains,
    geometry,
    parameters,
    pieces_by_pair,
    pieces_of_cell,
    stages,
    volume,
)


def owners(model: Model, layout: Layout, mesh: Mesh) -> dict[str, int]:
    """A rank for each parameter that is to have it whole: of its stages the one with the fewest bytes so far, largest
    parameters first."""
    view = MeshView.of(layout, mesh)
    loads = [[(0, view.rank(cell, replica)) for replica in range(view.replicas) for cell in cells(layout, pp_rank)]
             for pp_rank in range(layout.pp)]
    for heap in loads:
        heapify(heap)
    chosen: dict[str, int] = {}
    for size, parameter in sorted(((volume(_whole(p)), p) for p in parameters(model)), key=lambda x: -x[0]):
        stage = min(stages(parameter, model.layers, layout), key=lambda s: loads[s][0])
        load, owner = loads[stage][0]
        heapreplace(loads[stage], (load + size, owner))
        chosen[parameter.name] = owner
    return {p.name: chosen[p.name] for p in parameters(model)}


def gather(model: Model, layout: Layout, mesh: Mesh, owners: Mapping[str, int],
           rank: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What `rank` sends and receives so that each parameter becomes whole on its owner; by peer."""
    return gather_messages(model, layout, mesh, owners, (rank,))[rank]


def gather_messages(model: Model, layout: Layout, mesh: Mesh, owners: Mapping[str, int],
            ranks: Sequence[int]) -> dict[int, tuple[tuple[Message, ...], tuple[Message, ...]]]:
    """`gather` for each of some ranks."""
    sends: dict[int, dict[int, list[tuple[str, Box]]]] = {rank: defaultdict(list) for rank in ranks}
    receives: dict[int, dict[int, list[tuple[str, Box]]]] = {rank: defaultdict(list) for rank in ranks}
    view = MeshView.of(layout, mesh)
    sources = _Sources(layout, view)
    senders: dict[tuple[int, int], list[int]] = defaultdict(list)  # (pp rank, replica) -> those of the ranks
    for rank in ranks:
        if (cell := view.cell(rank)) is not None:
            senders[cell.pp_rank, view.replica(rank)].append(rank)
    for parameter in parameters(model):
        owner = owners[parameter.name]
        if owner in receives:
            lacking: Iterable[tuple[int, Box]] = _lacking(parameter, model, layout, sources, owner)
        else:
            place = _source_place(parameter, model, layout, view, owner)
            lacking = _lacking(parameter, model, layout, sources, owner, senders.get(place, ()))
        for src, box in lacking:
            if src in sends:
                sends[src][owner].append((parameter.name, box))
            if owner in receives:
                receives[owner][src].append((parameter.name, box))
    return {rank: (_messages(sends[rank]), _messages(receives[rank])) for rank in sends}


def _messages(by_peer: Mapping[int, list[tuple[str, Box]]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(by_peer[peer])) for peer in sorted(by_peer))


class _Sources:
    """Boxes that together are a whole parameter, and the ranks that send them: the same for all layers of a spec."""

    def __init__(self, layout: Layout, view: MeshView):
        self.layout, self.view = layout, view
        # name of the spec -> what `division` says
        self.boxes: dict[str, tuple[tuple[int, int, Box], ...]] = {}
        # name of the spec -> (part, zero shard) -> of these, the boxes of one pair
        self.boxes_at: dict[str, Mapping[tuple[int, int], Sequence[Box]]] = {}
        # results of `of`
        self.cache: dict[tuple[str, int, int], tuple[tuple[int, int, Box], ...]] = {}

    def of(self, spec: ParamSpec, pp_rank: int, replica: int) -> tuple[tuple[int, int, Box], ...]:
        """(rank, zero shard, box)es. pp_rank, replica: of the ranks."""
        key = (spec.name, pp_rank, replica)
        if key not in self.cache:
            self._divide(spec)
            self.cache[key] = tuple((self.view.rank(Cell(pp_rank, part, zero_shard), replica), zero_shard, box)
                                    for part, zero_shard, box in self.boxes[spec.name])
        return self.cache[key]

    def of_rank(self, spec: ParamSpec, rank: int) -> Iterator[tuple[int, int, Box]]:
        """What one rank sends of a parameter."""
        self._divide(spec)
        if (cell := self.view.cell(rank)) is not None:
            pair = cell.part, cell.zero_shard
            yield from ((rank, cell.zero_shard, box) for box in self.boxes_at[spec.name].get(pair, ()))

    def _divide(self, spec: ParamSpec) -> None:
        if spec.name not in self.boxes:
            self.boxes[spec.name] = division(spec, self.layout)
            self.boxes_at[spec.name] = _division_by_pair(geometry(spec), bare_layout(self.layout))


def division(spec: ParamSpec, layout: Layout) -> tuple[tuple[int, int, Box], ...]:
    """(part, zero shard, box)es that together are the whole parameter, each box where it occurs first. Cached: the
    owners of all layers, and the verifier, ask for the same."""
    return _division(geometry(spec), bare_layout(layout))


@lru_cache(maxsize=256)
def _division(spec: ParamSpec, layout: Layout) -> tuple[tuple[int, int, Box], ...]:
    seen: dict[int, list[Box]] = defaultdict(list)  # by zero shard: boxes of different ones do not overlap
    found: list[tuple[int, int, Box]] = []
    for (part, zero_shard), pieces in pieces_by_pair(spec, layout).items():
        for piece in pieces:
            for box in seen[zero_shard]:
                if contains(box, piece.box):
                    break
            else:
                seen[zero_shard].append(piece.box)
                found.append((part, zero_shard, piece.box))
    return tuple(found)


@lru_cache(maxsize=256)
def _division_by_pair(spec: ParamSpec, layout: Layout) -> Mapping[tuple[int, int], Sequence[Box]]:
    by_pair: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for part, zero_shard, box in _division(spec, layout):
        by_pair[part, zero_shard].append(box)
    return by_pair


def _source_place(parameter: Parameter, model: Model, layout: Layout, view: MeshView, owner: int) -> tuple[int, int]:
    """(pp rank, replica) of the ranks that send a parameter to its owner: the owner's own, where these hold it."""
    pp_ranks, cell = stages(parameter, model.layers, layout), view.cell(owner)
    if cell is None:
        return pp_ranks[0], 0
    return cell.pp_rank if cell.pp_rank in pp_ranks else pp_ranks[0], view.replica(owner)


def _lacking(parameter: Parameter, model: Model, layout: Layout, sources: _Sources, owner: int,
             senders: Sequence[int] | None = None) -> Iterator[tuple[int, Box]]:
    """(sender, box) of everything that the owner does not hold. senders: from these alone, which are at the place from
    which the owner gets it; None: from all."""
    cell = sources.view.cell(owner)
    held = [p.box for p in pieces_of_cell(parameter, model.layers, layout, cell)]
    if senders is None:
        found: Iterable[tuple[int, int, Box]] = sources.of(
            parameter.spec, *_source_place(parameter, model, layout, sources.view, owner))
    else:
        found = (x for rank in senders for x in sources.of_rank(parameter.spec, rank))
    for rank, zero_shard, box in found:
        if cell is None or zero_shard != cell.zero_shard or not any(contains(own, box) for own in held):
            yield rank, box


def _whole(parameter: Parameter) -> Box:
    return tuple((0, n) for n in parameter.spec.shape)
