"""Nodes whose devices have the same cells under both layouts form a group: they send and receive the same.

In: layouts on their meshes. Out: the cell of each rank, in closed form, and the groups of the nodes that the
destination uses.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Mesh
from rldsl.sharding.boxes import Cell, num_parts, num_zero_shards
from rldsl.sharding.layout import check_mesh

CellPairs = tuple[tuple[Cell | None, Cell | None], ...]  # per device of a node: its cell under source and destination


@dataclass(frozen=True, slots=True)
class MeshView:
    """A layout on its mesh: rank to cell and back, in closed form."""

    parts: int  # into how many parts tp and ep divide the parameters of a pipeline stage
    zero_shards: int  # into how many runs of rows zero divides each part
    replicas: int  # ranks at each cell
    runs: tuple[tuple[int, int, int], ...]  # (first rank, past the last, index of the first in the mesh), by rank
    ordered: tuple[tuple[int, int, int], ...]  # the same, by index in the mesh
    starts: tuple[int, ...] = field(repr=False)  # first ranks of `runs`
    indices: tuple[int, ...] = field(repr=False)  # of the first rank of each run, as in `ordered`

    @staticmethod
    def of(layout: Layout, mesh: Mesh) -> MeshView:
        before = accumulate((stop - start for start, stop in mesh.ranks), initial=0)
        ordered = tuple((start, stop, at) for (start, stop), at in zip(mesh.ranks, before, strict=False))
        total = sum(stop - start for start, stop in mesh.ranks)
        check_mesh(layout, mesh)
        runs = tuple(sorted(ordered))
        count = num_zero_shards(layout)
        replicas = total // (layout.pp * num_parts(layout) * count)
        return MeshView(num_parts(layout), count, replicas, runs, ordered, tuple(r[0] for r in runs),
                        tuple(r[2] for r in ordered))

    def index(self, rank: int) -> int | None:
        """The position of `rank` in the mesh; None outside it."""
        at = bisect_right(self.starts, rank) - 1
        if at < 0 or rank >= self.runs[at][1]:
            return None
        return self.runs[at][2] + rank - self.runs[at][0]

    def cell(self, rank: int) -> Cell | None:
        """The cell of `rank`; None outside the mesh."""
        index = self.index(rank)
        if index is None:
            return None
        pp_rank, zero_shard = divmod(index // (self.replicas * self.parts), self.zero_shards)
        return Cell(pp_rank, index % self.parts, zero_shard)

    def replica(self, rank: int) -> int:
        """Which of the replicas of its cell `rank` is."""
        index = self.index(rank)
        if index is None:
            raise internal_error(f"rank {rank} is not in the mesh of its layout", place="resharding")
        return index // self.parts % self.replicas

    def rank(self, cell: Cell, replica: int) -> int:
        """The rank that is replica `replica` of a cell."""
        block = cell.pp_rank * self.zero_shards + cell.zero_shard
        index = (block * self.replicas + replica) * self.parts + cell.part
        at = bisect_right(self.indices, index) - 1
        return self.ordered[at][0] + index - self.ordered[at][2]

    def block_signature(self, first: int, size: int) -> tuple[object, int]:
        """(signature of the block of `size` ranks from `first` on, how many blocks from this one on are known to have
        it). Two blocks have the same signature only if their ranks have the same cells. Signatures may differ although
        the cells are equal; `node_groups` merges those. Takes one step if the block lies within one zero shard of one
        stage."""
        at = bisect_right(self.starts, first) - 1
        if at >= 0 and first + size <= self.runs[at][1]:
            start, stop, index_of_start = self.runs[at]
            index, shard = index_of_start + first - start, self.replicas * self.parts
            if index // shard == (index + size - 1) // shard:
                until = min(stop - first, shard - index % shard)  # ranks in this run and shard
                return (index // shard, index % self.parts), until // size if size % self.parts == 0 else 1
        elif at < 0 or self.runs[at][1] <= first:
            if at + 1 == len(self.runs):
                return None, sys.maxsize
            if first + size <= self.starts[at + 1]:
                return None, (self.starts[at + 1] - first) // size
        return tuple(self.cell(rank) for rank in range(first, first + size)), 1


def node_groups(src: MeshView, dst: MeshView, devices: int) -> dict[CellPairs, tuple[int, ...]]:
    """The nodes of each group, ascending, for nodes of `devices` ranks; in the order of their first nodes."""
    by_signature: dict[tuple[object, object], list[int]] = {}
    for run in _nodes(dst, devices):
        node = run.start
        while node < run.stop:
            source, as_source = src.block_signature(node * devices, devices)
            wanted, as_wanted = dst.block_signature(node * devices, devices)
            stop = min(node + min(as_source, as_wanted), run.stop)
            by_signature.setdefault((source, wanted), []).extend(range(node, stop))
            node = stop
    by_cells: dict[CellPairs, list[int]] = {}
    for nodes in by_signature.values():  # two signatures may stand for the same cells
        block = range(nodes[0] * devices, (nodes[0] + 1) * devices)
        by_cells.setdefault(tuple((src.cell(r), dst.cell(r)) for r in block), []).extend(nodes)
    return {cells: tuple(sorted(nodes)) for cells, nodes in by_cells.items()}


def _nodes(view: MeshView, devices: int) -> Iterator[range]:
    """Every node that has a rank of the mesh, ascending, a range for each of its runs."""
    last = -1
    for start, stop, _ in view.runs:
        nodes = range(max(last + 1, start // devices), (stop - 1) // devices + 1)
        yield nodes
        last = max(last, nodes.stop - 1)
