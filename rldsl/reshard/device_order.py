"""Free device order: which rank takes which coordinate of a destination, so that most bytes stay where they are.

In: a model under its source layout, a destination layout, and ranks for it. Out: the destination's mesh, with the ranks
reordered. Whole nodes are permuted, and ranks inside a node, so a parallel group that fitted into a node still does.
Both are transport problems and solved exactly: while some cycle of exchanges keeps more bytes in place, it is applied
(Klein 1967). Among equally good orders the one nearest to the given order is taken.

HybridFlow's grouping without redundancy (Sheng et al. 2024, arXiv 2409.19256), which takes generation groups at a
stride inside training groups, is the special case where every training shard lies inside a generation shard.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import TypeVar

from rldsl.diag import internal_error
from rldsl.plan.model import Layout, Mesh, Model, Ranges
from rldsl.plan.projection import to_ranges
from rldsl.reshard.box_classes import box_classes
from rldsl.reshard.node_groups import MeshView
from rldsl.sharding.boxes import Cell
from rldsl.sharding.layout import degree_product

Row = TypeVar("Row", bound=Hashable)
Column = TypeVar("Column", bound=Hashable)
Vertex = tuple[int, Hashable]  # (0, row) or (1, column)

NodeCells = tuple[Cell | None, ...]  # of the ranks of one node
CellCounts = Counter[tuple[Cell | None, Cell | None]]  # (held cell, wanted cell) -> number of ranks


def reorder_devices(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, ranks: Ranges,
                    devices_per_node: int) -> Mesh:
    """The mesh of `dst`, made of ranks out of `ranks`, which are at least as many as it needs: the first of them in
    their order, unless another choice keeps more bytes in place. Errors: InternalError if they are too few."""
    members = Mesh(dst.mesh, ranks).members()
    size = degree_product(dst)
    if not len(set(members)) == len(members) >= size:
        raise internal_error(f"{len(set(members))} ranks for the {size} of layout {dst.id}", place="device order")
    kept = _kept(model, src, dst)
    src_view, dst_view = MeshView.of(src, src_mesh), MeshView.of(dst, Mesh(dst.mesh, ((0, size),)))
    nodes: dict[int, list[int]] = defaultdict(list)  # node -> positions in `members`
    for position, rank in enumerate(members):
        nodes[rank // devices_per_node].append(position)
    held = {node: tuple(src_view.cell(members[x]) for x in positions) for node, positions in nodes.items()}
    wanted = {node: tuple(dst_view.cell(x) for x in positions) for node, positions in nodes.items()}

    @cache
    def inside(row: NodeCells, column: NodeCells) -> tuple[int, CellCounts]:
        """Elements kept if a node that holds `row` takes the cells `column`, and the assignment of its ranks."""
        best = best_assignment(Counter(zip(row, column, strict=True)), lambda a, b: kept.get((a, b), 0))
        return sum(kept.get(ends, 0) * n for ends, n in best.items()), best

    given = Counter((held[node], wanted[node]) for node in nodes)
    best = best_assignment(given, lambda a, b: inside(a, b)[0] if len(a) == len(b) else None)
    order: dict[int, int] = {}  # position -> rank
    for node, other in _matched(held, wanted, best).items():
        cells = inside(held[node], wanted[other])[1]
        pairs = _matched(dict(enumerate(held[node])), dict(enumerate(wanted[other])), cells)
        order |= {nodes[other][b]: members[nodes[node][a]] for a, b in pairs.items()}
    return Mesh(dst.mesh, to_ranges([order[x] for x in range(size)]))


def _kept(model: Model, src: Layout, dst: Layout) -> dict[tuple[Cell | None, Cell | None], int]:
    """Elements that a rank has already when it goes from one cell to the other."""
    kept: Counter[tuple[Cell | None, Cell | None]] = Counter()
    for box_class in box_classes(model, src, dst):
        for holder in box_class.holders:
            for needer in box_class.needers:
                kept[holder, needer] += box_class.size
    return dict(kept)


def best_assignment(given: Mapping[tuple[Row, Column], int],
                    worth: Callable[[Row, Column], int | None]) -> Counter[tuple[Row, Column]]:
    """How many of each row go to each column so that the sum of `worth` is largest, with as many in each row and column
    as `given` has. None: not allowed, except where `given` has it."""
    flow = Counter({ends: n for ends, n in given.items() if n})
    rows, columns = list(dict.fromkeys(row for row, _ in flow)), list(dict.fromkeys(column for _, column in flow))
    values = {(a, b): v for a in rows for b in columns if (v := worth(a, b)) is not None}
    while cycle := _cycle(flow, values):
        amount = min(flow[ends] for ends, sign in cycle if sign < 0)
        for ends, sign in cycle:
            flow[ends] += sign * amount
    return +flow


def _cycle(flow: Mapping[tuple[Row, Column], int],
           values: Mapping[tuple[Row, Column], int]) -> list[tuple[tuple[Row, Column], int]]:
    """Exchanges that gain: one more of each (ends, 1), one less of each (ends, -1). By Bellman and Ford."""
    edges: list[tuple[Vertex, Vertex, int, tuple[tuple[Row, Column], int]]]
    edges = [((0, a), (1, b), v, ((a, b), 1)) for (a, b), v in values.items()]
    edges += [((1, b), (0, a), -values.get((a, b), 0), ((a, b), -1)) for (a, b), n in flow.items() if n]
    best: dict[Vertex, int] = dict.fromkeys((end for e in edges for end in e[:2]), 0)
    came: dict[Vertex, tuple[Vertex, tuple[tuple[Row, Column], int]]] = {}
    gaining: Vertex | None = None
    for _ in range(len(best) + 1):
        gaining = None
        for start, end, gain, step in edges:
            if best[start] + gain > best[end]:
                best[end], came[end], gaining = best[start] + gain, (start, step), end
        if gaining is None:
            break
    if gaining is None:
        return []
    start = gaining  # an edge still gains after len(best) rounds: there is a cycle
    for _ in best:  # far enough back to be on the cycle
        start = came[start][0]
    steps: list[tuple[tuple[Row, Column], int]] = []
    at = start
    while not steps or at != start:
        at, step = came[at]
        steps.append(step)
    return steps


def _matched(rows: Mapping[int, Row], columns: Mapping[int, Column],
             best: Mapping[tuple[Row, Column], int]) -> dict[int, int]:
    """A column's item for each row's, in the numbers that `best` says; its own where that may be."""
    left = Counter(best)
    assigned: dict[int, int] = {}
    for i in rows:
        if left[rows[i], columns[i]] > 0:
            left[rows[i], columns[i]] -= 1
            assigned[i] = i
    free: dict[Column, list[int]] = defaultdict(list)
    for i in columns:
        if i not in assigned:
            free[columns[i]].append(i)
    for i in rows:
        if i not in assigned:
            column = next(c for c in free if left[rows[i], c] > 0 and free[c])
            left[rows[i], column] -= 1
            assigned[i] = free[column].pop(0)
    return assigned
