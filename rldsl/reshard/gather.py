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
    part_shards,
    pieces_at,
    pieces_of_cell,
    stages,
    volume,
)


def owners(model: Model, layout: Layout, mesh: Mesh) -> dict[str, int]:
    """A rank for each parameter that is to have it whole: of its stages the one with the fewest bytes so far, largest
    parameters first."""
    side = MeshView.of(layout, mesh)
    loads = [[(0, side.rank(cell, replica)) for replica in range(side.replicas) for cell in cells(layout, stage)]
             for stage in range(layout.pp)]
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
    """Boxes that are a whole parameter, and who sends them: the same for all layers of a group."""

    def __init__(self, layout: Layout, side: MeshView):
        self.layout, self.side = layout, side
        self.boxes: dict[str, tuple[tuple[int, int, Box], ...]] = {}
        self.known: dict[tuple[str, int, int], tuple[tuple[int, int, Box], ...]] = {}

    def of(self, spec: ParamSpec, stage: int, replica: int) -> tuple[tuple[int, int, Box], ...]:
        """(rank, shard, box). stage, replica: of the ranks."""
        key = (spec.name, stage, replica)
        if key not in self.known:
            if spec.name not in self.boxes:
                self.boxes[spec.name] = tuple(self._divided(spec))
            self.known[key] = tuple((self.side.rank(Cell(stage, part, shard), replica), shard, box)
                                    for part, shard, box in self.boxes[spec.name])
        return self.known[key]

    def _divided(self, spec: ParamSpec) -> Iterator[tuple[int, int, Box]]:
        """(part, shard, box), each box where it is found first."""
        seen: dict[int, list[Box]] = defaultdict(list)  # by shard: those of different ones have nothing in common
        for part, shard in part_shards(self.layout):
            for piece in pieces_at(spec, self.layout, part, shard):
                if not any(contains(box, piece.box) for box in seen[shard]):
                    seen[shard].append(piece.box)
                    yield part, shard, piece.box


def _lacking(parameter: Parameter, model: Model, layout: Layout, sources: _Sources,
             owner: int) -> Iterator[tuple[int, Box]]:
    """(sender, box) of all that the owner does not hold."""
    at = sources.side.cell(owner)
    mine = [p.box for p in pieces_of_cell(parameter, model.layers, layout, at)]
    there, replica = stages(parameter, model.layers, layout), 0
    stage = there[0]
    if at is not None:
        stage, replica = at.stage if at.stage in there else stage, sources.side.replica(owner)
    for rank, shard, box in sources.of(parameter.spec, stage, replica):
        if at is None or shard != at.shard or not any(contains(own, box) for own in mine):
            yield rank, box


def _whole(parameter: Parameter) -> Box:
    return tuple((0, n) for n in parameter.spec.shape)
