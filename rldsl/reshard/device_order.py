"""Device order left free: which rank takes which coordinate of a destination, so that most bytes stay where they are.

In: a model under its source layout, a destination layout, and ranks for it. Out: the destination's mesh, the ranks in
another order. Two things are permuted: whole nodes, and the ranks inside a node; so a group that lay inside a node in
the order as given still does. Both are transport problems, solved exactly: as long as some cycle of exchanges keeps
more bytes in place, it is made (Klein 1967). Among equally good orders the nearest to the one given is taken.

The grouping without redundancy of HybridFlow (Sheng et al. 2024, arXiv 2409.19256), generation groups taken at a
stride inside training groups, is the special case in which every training shard lies inside a generation shard.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from rldsl.plan.model import Layout, Mesh, Model, Ranges
from rldsl.plan.projection import to_ranges
from rldsl.reshard.node_groups import Side
from rldsl.reshard.shard_classes import lines
from rldsl.sharding.boxes import Cell
from rldsl.sharding.layout import degree_product

Row = TypeVar("Row", bound=Hashable)
Column = TypeVar("Column", bound=Hashable)

Standing = tuple[Cell | None, ...]  # of the ranks of one node


def relabel(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, ranks: Ranges, devices_per_node: int) -> Mesh:
    """The mesh of `dst`, of ranks out of `ranks`, of which there are at least as many as it needs. As given: the first
    of them, in their order."""
    every = Mesh(dst.mesh, ranks).members()
    size = degree_product(dst)
    assert len(set(every)) == len(every) >= size, f"{len(every)} ranks for the {size} of layout {dst.id}"
    kept = _kept(model, src, dst)
    here, there = Side.of(src, src_mesh), Side.of(dst, Mesh(dst.mesh, ((0, size),)))
    nodes: dict[int, list[int]] = defaultdict(list)  # node -> positions in `every`
    for position, rank in enumerate(every):
        nodes[rank // devices_per_node].append(position)
    held = {node: tuple(here.cell(every[x]) for x in found) for node, found in nodes.items()}
    wanted = {node: tuple(there.cell(x) for x in found) for node, found in nodes.items()}

    known: dict[tuple[Standing, Standing], tuple[int, Counter[tuple[Cell | None, Cell | None]]]] = {}

    def inside(row: Standing, column: Standing) -> tuple[int, Counter[tuple[Cell | None, Cell | None]]]:
        if (row, column) not in known:
            best = exchange(Counter(zip(row, column)), lambda a, b: kept.get((a, b), 0))
            known[row, column] = sum(kept.get(ends, 0) * n for ends, n in best.items()), best
        return known[row, column]

    given = Counter((held[node], wanted[node]) for node in nodes)
    best = exchange(given, lambda a, b: inside(a, b)[0] if len(a) == len(b) else None)
    order: dict[int, int] = {}  # position -> rank
    for node, other in _matched(held, wanted, best).items():
        cells = inside(held[node], wanted[other])[1]
        pairs = _matched(dict(enumerate(held[node])), dict(enumerate(wanted[other])), cells)
        order |= {nodes[other][b]: every[nodes[node][a]] for a, b in pairs.items()}
    return Mesh(dst.mesh, to_ranges([order[x] for x in range(size)]))


def _kept(model: Model, src: Layout, dst: Layout) -> dict[tuple[Cell | None, Cell | None], int]:
    """Elements that a rank has already when it goes from one cell to the other."""
    found: Counter[tuple[Cell | None, Cell | None]] = Counter()
    for line in lines(model, src, dst):
        for a in line.have:
            for b in line.want:
                found[a, b] += line.size
    return dict(found)


def exchange(given: Mapping[tuple[Row, Column], int],
             worth: Callable[[Row, Column], int | None]) -> Counter[tuple[Row, Column]]:
    """How many of each row go to each column so that the sum of `worth` is largest, with as many in each row and column
    as `given` has. None: not allowed, except where `given` has it."""
    flow = Counter({ends: n for ends, n in given.items() if n})
    rows, columns = (list(dict.fromkeys(ends[i] for ends in flow)) for i in (0, 1))
    values = {(a, b): v for a in rows for b in columns if (v := worth(a, b)) is not None}
    while cycle := _cycle(flow, values):
        amount = min(flow[ends] for ends, sign in cycle if sign < 0)
        for ends, sign in cycle:
            flow[ends] += sign * amount
    return +flow


def _cycle(flow: Mapping[tuple[Row, Column], int],
           values: Mapping[tuple[Row, Column], int]) -> list[tuple[tuple[Row, Column], int]]:
    """Exchanges that gain: one more of each (ends, 1), one less of each (ends, -1). By Bellman and Ford."""
    edges = [((0, a), (1, b), v, ((a, b), 1)) for (a, b), v in values.items()]
    edges += [((1, b), (0, a), -values.get((a, b), 0), ((a, b), -1)) for (a, b), n in flow.items() if n]
    best: dict[tuple[int, object], int] = dict.fromkeys((end for e in edges for end in e[:2]), 0)
    came: dict[tuple[int, object], tuple[tuple[int, object], tuple[tuple[Row, Column], int]]] = {}
    for _ in range(len(best) + 1):
        last = None
        for start, end, gain, step in edges:
            if best[start] + gain > best[end]:
                best[end], came[end], last = best[start] + gain, (start, step), end
        if last is None:
            return []
    for _ in best:  # far enough back to stand on the cycle
        last = came[last][0]
    steps, at = [], last
    while not steps or at != last:
        at, step = came[at]
        steps.append(step)
    return steps


def _matched(rows: Mapping[int, Row], columns: Mapping[int, Column],
             best: Mapping[tuple[Row, Column], int]) -> dict[int, int]:
    """A column's item for each row's, in the numbers that `best` says; its own where that may be."""
    left = Counter(best)
    found: dict[int, int] = {}
    for i in rows:
        if left[rows[i], columns[i]] > 0:
            left[rows[i], columns[i]] -= 1
            found[i] = i
    free: dict[Column, list[int]] = defaultdict(list)
    for i in columns:
        if i not in found:
            free[columns[i]].append(i)
    for i in rows:
        if i not in found:
            column = next(c for c in free if left[rows[i], c] > 0 and free[c])
            left[rows[i], column] -= 1
            found[i] = free[column].pop(0)
    return found
