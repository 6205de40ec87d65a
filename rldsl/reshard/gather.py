"""Every parameter whole on one rank, for saving.

In: a model under a layout. Out: an owner for each parameter, and the messages of one rank that bring it what it lacks.
The other parts come from the owner's own tensor-parallel group, so nothing leaves the node where such groups fit into
nodes, and no rank sends more than its part. Where zero divides rows over dp, they come from the owner's stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec
from rldsl.reshard.node_groups import MeshView
from rldsl.reshard.rounds import Message
from rldsl.sharding.boxes import (
    Box,
    Cell,
    Parameter,
    cells,
    contains,
    parameters,
    part_shard_pairs,
    pieces_at,
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
    sources = _Sources(layout, MeshView.of(layout, mesh))
    for parameter in parameters(model):
        owner = owners[parameter.name]
        for src, box in _lacking(parameter, model, layout, sources, owner):
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
        # name of the spec -> its (part, zero shard, box)es
        self.boxes: dict[str, tuple[tuple[int, int, Box], ...]] = {}
        # results of `of`
        self.cache: dict[tuple[str, int, int], tuple[tuple[int, int, Box], ...]] = {}

    def of(self, spec: ParamSpec, pp_rank: int, replica: int) -> tuple[tuple[int, int, Box], ...]:
        """(rank, zero shard, box)es. pp_rank, replica: of the ranks."""
        key = (spec.name, pp_rank, replica)
        if key not in self.cache:
            if spec.name not in self.boxes:
                self.boxes[spec.name] = tuple(self._divided(spec))
            self.cache[key] = tuple((self.view.rank(Cell(pp_rank, part, zero_shard), replica), zero_shard, box)
                                    for part, zero_shard, box in self.boxes[spec.name])
        return self.cache[key]

    def _divided(self, spec: ParamSpec) -> Iterator[tuple[int, int, Box]]:
        """(part, zero shard, box)es, each box where it occurs first."""
        seen: dict[int, list[Box]] = defaultdict(list)  # by zero shard: boxes of different ones do not overlap
        for part, zero_shard in part_shard_pairs(self.layout):
            for piece in pieces_at(spec, self.layout, part, zero_shard):
                if not any(contains(box, piece.box) for box in seen[zero_shard]):
                    seen[zero_shard].append(piece.box)
                    yield part, zero_shard, piece.box


def _lacking(parameter: Parameter, model: Model, layout: Layout, sources: _Sources,
             owner: int) -> Iterator[tuple[int, Box]]:
    """(sender, box) of everything that the owner does not hold."""
    cell = sources.view.cell(owner)
    held = [p.box for p in pieces_of_cell(parameter, model.layers, layout, cell)]
    pp_ranks, replica = stages(parameter, model.layers, layout), 0
    pp_rank = pp_ranks[0]
    if cell is not None:
        pp_rank, replica = cell.pp_rank if cell.pp_rank in pp_ranks else pp_rank, sources.view.replica(owner)
    for rank, zero_shard, box in sources.of(parameter.spec, pp_rank, replica):
        if cell is None or zero_shard != cell.zero_shard or not any(contains(own, box) for own in held):
            yield rank, box


def _whole(parameter: Parameter) -> Box:
    return tuple((0, n) for n in parameter.spec.shape)
