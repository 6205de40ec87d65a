"""What one rank sends and receives in a reallocation, by the links that it takes.

In: the paths of a reallocation, a rank. Out: elements, inside its node and between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rldsl.plan.realloc.lanes import Lane, rank_lanes
from rldsl.plan.realloc.records import Paths
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


def traffic(way: Paths, rank: int) -> Traffic:
    """What `rank` sends and receives on the paths of a reallocation."""
    sends, receives = rank_lanes(way, rank)
    return Traffic(*_elements(way, rank, receives), *_elements(way, rank, sends))


def _elements(way: Paths, rank: int, lanes: Iterable[Lane]) -> tuple[int, int]:
    """(inside the node of `rank`, between nodes)."""
    near = far = 0
    for lane in lanes:
        if lane.peer // way.devices == rank // way.devices:
            near += lane.stop - lane.start
        else:
            far += lane.stop - lane.start
    return near, far
