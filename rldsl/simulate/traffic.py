"""What ranks send and receive in a reallocation, by the links that it takes.

In: the paths of a reallocation. Out: elements of each rank, inside its node and between nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from rldsl.plan.model import Ranges
from rldsl.reshard.records import NodeGroup, Routes, arrivals_by_device, forwarded_by_device
from rldsl.sharding.boxes import Cell
from rldsl.simulate.times import Machine


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements: `near` inside the node, `far` to or from other nodes."""

    near_in: int
    far_in: int
    near_out: int
    far_out: int

    @property
    def received(self) -> int:
        """Elements that come, over all links."""
        return self.near_in + self.far_in

    @property
    def sent(self) -> int:
        """Elements that go, over all links."""
        return self.near_out + self.far_out

    @property
    def crosses(self) -> bool:
        """Whether any of it travels between nodes."""
        return self.far_in + self.far_out > 0

    def receiving(self, machine: Machine, item: int) -> float:
        """Seconds until all has come; item: bytes of an element. What comes from other nodes is passed on inside the
        node bucket by bucket, so links and network work at the same time."""
        return max(machine.link(item * self.near_in, False), machine.link(item * self.far_in, True))

    def sending(self, machine: Machine, item: int) -> float:
        """Seconds until all has gone."""
        return max(machine.link(item * self.near_out, False), machine.link(item * self.far_out, True))


NONE = Traffic(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Loads:
    """What every rank sends and receives, summed up from the paths. What a cell sends over the network counts for each
    rank at it, also where only some of them send. kind: of each node. inside: by kind and device. alone: of ranks that
    only send."""

    way: Routes
    kind: Mapping[int, int]
    inside: Sequence[Sequence[Traffic]]
    alone: Mapping[Cell, Traffic]

    @staticmethod
    def of(way: Routes) -> Loads:
        alone = {cell: Traffic(0, 0, 0, -(-s.size // s.num_senders)) for cell, s in way.senders.items()}
        return Loads(way, {node: q for q, kind in enumerate(way.groups) for node in kind.nodes},
                     tuple(tuple(_devices(way, kind)) for kind in way.groups), alone)

    def every(self) -> tuple[Traffic, ...]:
        return (*(t for devices in self.inside for t in devices), *self.alone.values())

    def rank(self, rank: int) -> Traffic:
        node, device = divmod(rank, self.way.devices)
        if node in self.kind:
            return self.inside[self.kind[node]][device]
        cell = self.way.src.cell(rank)
        return self.alone.get(cell, NONE) if cell is not None else NONE

    def most(self, ranks: Ranges) -> Traffic:
        """Of some ranks that wait for each other."""
        seen = {self.rank(r) for start, stop in ranks for r in range(start, stop)}
        return Traffic(*(max(getattr(t, f.name) for t in seen) for f in fields(Traffic)))


def _devices(way: Routes, kind: NodeGroup) -> Iterator[Traffic]:
    """What comes in over the network, the devices by which it comes give to the others."""
    came = arrivals_by_device(kind.arrivals.values())
    near_in, far_in, near_out, far_out = Counter[int](), Counter[int](), forwarded_by_device(came), Counter[int]()
    for needers, parts in came.items():
        near_in.update(dict.fromkeys(needers, sum(parts.values())))
        for who, size in parts.items():
            far_in[who] += size
            near_in[who] -= size * (who in needers)
            far_out[who] += size * (kind.num_trees < len(kind.nodes))
    for hop in kind.local_copies:
        near_in[hop.dst] += hop.stop - hop.start
        near_out[hop.src] += hop.stop - hop.start
    for device, (cell, _) in enumerate(kind.cells):
        source = way.senders.get(cell) if cell is not None else None
        far_out[device] += -(-source.size // source.num_senders) if source is not None else 0
        yield Traffic(near_in[device], far_in[device], near_out[device], far_out[device])
