"""Ranks by cell, and nodes by kind: nodes are of one kind when their ranks stand alike under both layouts.

In: layouts on their meshes. Out: where each rank stands, in closed form, and the kinds of nodes with ranks that the
destination has. All nodes of a kind take part in a reallocation in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from rldsl.plan.model import Layout, Mesh
from rldsl.sharding.boxes import Cell, parts, shards
from rldsl.sharding.layout import degree_product

Places = tuple[tuple[Cell | None, Cell | None], ...]  # for each device of a node: under the source, the destination


@dataclass(frozen=True, slots=True)
class Side:
    """A layout on its mesh. parts, shards: of a stage's parameters. copies: ranks at each cell. runs: (first rank, past
    the last, number of the first in the mesh), by rank."""

    parts: int
    shards: int
    copies: int
    runs: tuple[tuple[int, int, int], ...]
    ordered: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(layout: Layout, mesh: Mesh) -> Side:
        before = accumulate((stop - start for start, stop in mesh.ranks), initial=0)
        ordered = tuple((start, stop, at) for (start, stop), at in zip(mesh.ranks, before))
        total = sum(stop - start for start, stop in mesh.ranks)
        assert layout.mesh == mesh.id, f"layout {layout.id} is on mesh {layout.mesh}, not {mesh.id}"
        assert degree_product(layout) == total, f"layout {layout.id} does not fill mesh {mesh.id}"
        runs = tuple(sorted(ordered))
        count = shards(layout)
        return Side(parts(layout), count, total // (layout.pp * parts(layout) * count), runs, ordered, tuple(r[0] for r in runs))

    def index(self, rank: int) -> int | None:
        """The number of `rank` in the mesh."""
        at = bisect_right(self.starts, rank) - 1
        if at < 0 or rank >= self.runs[at][1]:
            return None
        return self.runs[at][2] + rank - self.runs[at][0]

    def cell(self, rank: int) -> Cell | None:
        index = self.index(rank)
        if index is None:
            return None
        stage, shard = divmod(index // (self.copies * self.parts), self.shards)
        return Cell(stage, index % self.parts, shard)

    def copy(self, rank: int) -> int:
        """Which of the ranks at its cell `rank` is."""
        index = self.index(rank)
        assert index is not None, f"rank {rank} is not in the mesh"
        return index // self.parts % self.copies

    def rank(self, cell: Cell, copy: int) -> int:
        index = ((cell.stage * self.shards + cell.shard) * self.copies + copy) * self.parts + cell.part
        at = bisect_right(self.ordered, index, key=lambda r: r[2]) - 1
        return self.ordered[at][0] + index - self.ordered[at][2]

    def key(self, first: int, stop: int) -> object:
        """Equal for two blocks of ranks only if their ranks stand alike. One step where the block lies in one shard of
        one stage."""
        at = bisect_right(self.starts, first) - 1
        if at >= 0 and stop <= self.runs[at][1]:
            index, shard = self.runs[at][2] + first - self.runs[at][0], self.copies * self.parts
            if index // shard == (index + stop - first - 1) // shard:
                return index // shard, index % self.parts
        elif (at < 0 or self.runs[at][1] <= first) and (at + 1 == len(self.runs) or stop <= self.starts[at + 1]):
            return None
        return tuple(self.cell(rank) for rank in range(first, stop))


def kinds(src: Side, dst: Side, devices: int) -> dict[Places, tuple[int, ...]]:
    """The nodes of each kind, ascending, for nodes of `devices` ranks; in the order of their first nodes."""
    keys: dict[tuple[object, object], list[int]] = {}
    for node in _nodes(dst, devices):
        first, stop = node * devices, (node + 1) * devices
        keys.setdefault((src.key(first, stop), dst.key(first, stop)), []).append(node)
    found: dict[Places, list[int]] = {}
    for nodes in keys.values():  # two keys may say the same
        block = range(nodes[0] * devices, (nodes[0] + 1) * devices)
        found.setdefault(tuple((src.cell(r), dst.cell(r)) for r in block), []).extend(nodes)
    return {places: tuple(sorted(nodes)) for places, nodes in found.items()}


def _nodes(side: Side, devices: int) -> Iterator[int]:
    """Every node with a rank of the mesh, ascending."""
    last = -1
    for start, stop, _ in side.runs:
        for node in range(max(last + 1, start // devices), (stop - 1) // devices + 1):
            yield node
            last = node
