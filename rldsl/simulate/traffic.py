"""What ranks send and receive in a reshard, by link.

In: the routes of a reshard. Out: elements of each rank, inside its node and between nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from rldsl.plan.model import Ranges
from rldsl.reshard.arrivals import forwarded_by_device
from rldsl.reshard.records import NodeGroup, ReshardPlan
from rldsl.sharding.boxes import Cell
from rldsl.simulate.machine import Machine


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends and receives, in elements."""

    intra_node_in: int  # received from devices of its node
    network_in: int  # received from other nodes
    intra_node_out: int  # sent to devices of its node
    network_out: int  # sent to other nodes

    @property
    def received(self) -> int:
        """Elements received, over all links."""
        return self.intra_node_in + self.network_in

    @property
    def sent(self) -> int:
        """Elements sent, over all links."""
        return self.intra_node_out + self.network_out

    @property
    def crosses(self) -> bool:
        """Whether any of it travels between nodes."""
        return self.network_in + self.network_out > 0

    def receiving(self, machine: Machine, item: int) -> float:
        """Seconds of receiving everything; item: bytes of an element. Data from other nodes is forwarded inside the
        node bucket by bucket, so links and network work at the same time."""
        return max(machine.link(item * self.intra_node_in, False), machine.link(item * self.network_in, True))

    def sending(self, machine: Machine, item: int) -> float:
        """Seconds of sending everything."""
        return max(machine.link(item * self.intra_node_out, False), machine.link(item * self.network_out, True))


NONE = Traffic(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Loads:
    """What every rank sends and receives, summed over the routes. What a cell sends over the network counts for every
    rank at it, even where only some of them send."""

    routes: ReshardPlan  # of the reshard
    group_of_node: Mapping[int, int]  # node -> index of its group in `routes.groups`
    by_group_and_device: Sequence[Sequence[Traffic]]  # of the ranks of receiving nodes
    pure_senders: Mapping[Cell, Traffic]  # of ranks on nodes that only send

    @staticmethod
    def of(routes: ReshardPlan) -> Loads:
        pure_senders = {cell: Traffic(0, 0, 0, -(-s.size // s.num_senders)) for cell, s in routes.senders.items()}
        return Loads(routes, {node: q for q, group in enumerate(routes.groups) for node in group.nodes},
                     tuple(tuple(_device_loads(routes, group)) for group in routes.groups), pure_senders)

    def distinct_loads(self) -> tuple[Traffic, ...]:
        return (*(t for devices in self.by_group_and_device for t in devices), *self.pure_senders.values())

    def rank(self, rank: int) -> Traffic:
        node, device = divmod(rank, self.routes.devices)
        if node in self.group_of_node:
            return self.by_group_and_device[self.group_of_node[node]][device]
        cell = self.routes.src.cell(rank)
        return self.pure_senders.get(cell, NONE) if cell is not None else NONE

    def max_load(self, ranks: Ranges) -> Traffic:
        """The maximum over some ranks, which wait for each other."""
        loads = {self.rank(r) for start, stop in ranks for r in range(start, stop)}
        return Traffic(*(max(getattr(t, f.name) for t in loads) for f in fields(Traffic)))


def _device_loads(routes: ReshardPlan, group: NodeGroup) -> Iterator[Traffic]:
    """The loads of the devices of a node. A device that receives over the network forwards to the others of its
    node."""
    arrived = group.arrivals.by_device
    intra_in, intra_out = Counter[int](), forwarded_by_device(arrived)
    network_in, network_out = Counter[int](), Counter[int]()
    for needers, parts in arrived.items():
        intra_in.update(dict.fromkeys(needers, sum(parts.values())))
        for who, size in parts.items():
            network_in[who] += size
            intra_in[who] -= size * (who in needers)
            network_out[who] += size * (group.num_trees < len(group.nodes))
    for copy in group.local_copies:
        intra_in[copy.dst] += copy.stop - copy.start
        intra_out[copy.src] += copy.stop - copy.start
    for device, (cell, _) in enumerate(group.cells):
        source = routes.senders.get(cell) if cell is not None else None
        network_out[device] += -(-source.size // source.num_senders) if source is not None else 0
        yield Traffic(intra_in[device], network_in[device], intra_out[device], network_out[device])
