"""Where the nodes of a graph without cycles stand, in layers from top to bottom, and which way its links go.

In: sizes of nodes and links between them. Out: `Drawing`, in the unit of the sizes. Layers by longest path; orders
within them by barycenters (Sugiyama et al. 1981); places by least squares under that order. The same graph gives the
same drawing. Pure geometry: it knows nothing of plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rldsl.pages.spread import spread

SWEEPS, PLACINGS, GAP, ROW, BENDS, MARGIN = 24, 90, 18.0, 34.0, 10.0, 12.0
STRAIGHT = (1.0, 2.0, 40.0)  # the pull of a link between two nodes, a node and a bend, two bends

Point = tuple[float, float]
Size = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Edge:
    """From a node to one below it."""

    source: str  # node
    target: str  # node
    length: int = 1  # the fewest layers between them


@dataclass(frozen=True, slots=True)
class Drawing:
    """Where nodes and edges are drawn."""

    width: float  # of the picture
    height: float  # of the picture
    centers: Mapping[str, Point]  # node -> its center
    # per edge its points, from the lower side of the source to the upper side of the target: it bends between points 0
    # and 1, 2 and 3, ..., and is straight in between
    routes: tuple[tuple[Point, ...], ...]


def draw(sizes: Mapping[str, Size], edges: Sequence[Edge], late: frozenset[str] = frozenset()) -> Drawing:
    """sizes: node -> width and height, in an order in which no edge goes backwards. late: nodes that stand just above
    the first that needs them instead of just below the last that they need. Parts that no edge connects stand side by
    side, the largest first."""
    left, bottom = 0.0, 0.0
    centers: dict[str, Point] = {}
    routes: dict[int, tuple[Point, ...]] = {}
    for names in sorted(parts(tuple(sizes), edges), key=len, reverse=True):
        mine = [i for i, e in enumerate(edges) if e.source in names]
        part = _part({n: sizes[n] for n in sizes if n in names}, [edges[i] for i in mine], late)
        centers |= {n: (x + left, y) for n, (x, y) in part.centers.items()}
        routes |= {i: tuple((x + left, y) for x, y in route) for i, route in zip(mine, part.routes, strict=True)}
        left, bottom = left + part.width, max(bottom, part.height)
    return Drawing(left, bottom, centers, tuple(routes[i] for i in range(len(edges))))


def parts(names: Sequence[str], edges: Sequence[Edge]) -> list[frozenset[str]]:
    """The sets of nodes that edges connect."""
    near: dict[str, list[str]] = {n: [] for n in names}
    for e in edges:
        near[e.source].append(e.target)
        near[e.target].append(e.source)
    found, seen = [], set[str]()
    for name in names:
        reached, fresh = set[str](), [] if name in seen else [name]
        while fresh:
            reached |= set(fresh)
            fresh = list(dict.fromkeys(m for n in fresh for m in near[n] if m not in reached))
        seen |= reached
        found += [frozenset(reached)] if reached else []
    return found


def _part(sizes: Mapping[str, Size], edges: Sequence[Edge], late: frozenset[str]) -> Drawing:
    """One connected part; its margins included."""
    layer = layers(tuple(sizes), edges, late)
    chains = [_chain(i, e, layer) for i, e in enumerate(edges)]
    rows: list[list[str]] = [[] for _ in range(max(layer.values()) + 1)]
    for name in sizes:
        rows[layer[name]].append(name)
    for chain in chains:
        for offset, bend in enumerate(chain[1:-1], 1):
            rows[layer[chain[0]] + offset].append(bend)
    links = [pair for chain in chains for pair in pairwise(chain)]
    rows = ordered(rows, links)
    x = _places(rows, links, sizes)
    heights = [max((sizes[n][1] for n in row if n in sizes), default=0.0) for row in rows]
    tops = [MARGIN]
    for height in heights[:-1]:
        tops.append(tops[-1] + height + (ROW if height else BENDS))
    centers = {n: (x[n], tops[layer[n]] + heights[layer[n]] / 2) for n in sizes}
    routes = []
    for edge, chain in zip(edges, chains, strict=True):
        (x0, y0), (x1, y1) = centers[edge.source], centers[edge.target]
        bends = [(x[bend], y) for at, bend in enumerate(chain[1:-1], layer[edge.source] + 1) if heights[at]
                 for y in (tops[at], tops[at] + heights[at])]
        routes.append(((x0, y0 + sizes[edge.source][1] / 2), *bends, (x1, y1 - sizes[edge.target][1] / 2)))
    right = max([*(x[n] + sizes[n][0] / 2 for n in sizes), *(px for route in routes for px, _ in route)])
    return Drawing(right + MARGIN, tops[-1] + heights[-1] + MARGIN, centers, tuple(routes))


def layers(names: Sequence[str], edges: Sequence[Edge], late: frozenset[str]) -> dict[str, int]:
    """Node -> layer, 0 at the top."""
    layer = dict.fromkeys(names, 0)
    into: dict[str, list[Edge]] = {n: [] for n in names}
    out: dict[str, list[Edge]] = {n: [] for n in names}
    for edge in edges:
        into[edge.target].append(edge)
        out[edge.source].append(edge)
    for name in names:
        layer[name] = max((layer[e.source] + e.length for e in into[name]), default=0)
    for name in reversed(names):
        if name in late and out[name]:
            layer[name] = min(layer[e.target] - e.length for e in out[name])
    return layer


def _chain(i: int, edge: Edge, layer: Mapping[str, int]) -> tuple[str, ...]:
    """The nodes of a link with a bend in every layer between; links of one source to one layer share none."""
    between = range(layer[edge.source] + 1, layer[edge.target])
    return edge.source, *(f"\0{i}.{at}" for at in between), edge.target


def ordered(rows: list[list[str]], links: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The rows, each sorted so that few links cross."""
    above: dict[str, list[str]] = {n: [] for row in rows for n in row}
    below: dict[str, list[str]] = {n: [] for row in rows for n in row}
    for a, b in links:
        above[b].append(a)
        below[a].append(b)
    best, fewest = rows, crossings(rows, below)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        made = [list(row) for row in rows]
        at = {n: float(i) for row in made for i, n in enumerate(row)}
        for row in made if down else reversed(made):
            center = {n: sum(at[m] for m in near[n]) / len(near[n]) if near[n] else at[n] for n in row}
            row.sort(key=lambda n: (center[n], at[n]))
            at |= {n: float(i) for i, n in enumerate(row)}
        _swap(made, above, below, at)
        rows, count = made, crossings(made, below)
        if count < fewest:
            best, fewest = made, count
    return best


def _swap(rows: list[list[str]], above: Mapping[str, Sequence[str]], below: Mapping[str, Sequence[str]],
          at: dict[str, float]) -> None:
    """Neighbors change places as long as fewer links cross then (Gansner et al. 1993)."""
    def gain(a: str, b: str) -> int:
        pairs = [(at[m], at[n]) for near in (above, below) for m in near[a] for n in near[b]]
        return sum(x > y for x, y in pairs) - sum(x < y for x, y in pairs)

    better = True
    while better:
        better = False
        for row in rows:
            for i in range(len(row) - 1):
                if gain(row[i], row[i + 1]) > 0:
                    row[i], row[i + 1] = row[i + 1], row[i]
                    at |= {row[i]: float(i), row[i + 1]: float(i + 1)}
                    better = True


def crossings(rows: Sequence[Sequence[str]], below: Mapping[str, Sequence[str]]) -> int:
    """How many pairs of links between neighboring rows cross."""
    found = 0
    for upper, lower in pairwise(rows):
        at = {n: i for i, n in enumerate(lower)}
        ends = [e for n in upper for e in sorted(at[m] for m in below[n])]
        found += sum(a > b for i, a in enumerate(ends) for b in ends[i + 1 :])
    return found


def _places(rows: Sequence[Sequence[str]], links: Sequence[tuple[str, str]],
            sizes: Mapping[str, Size]) -> dict[str, float]:
    """Node or bend -> x, each drawn to the mean of its neighbors, none over another, the leftmost at the margin."""
    half = {n: sizes[n][0] / 2 if n in sizes else 0.0 for row in rows for n in row}
    pulls: dict[str, list[tuple[str, float]]] = {n: [] for n in half}
    for a, b in links:
        pull = STRAIGHT[(a not in sizes) + (b not in sizes)]
        pulls[a].append((b, pull))
        pulls[b].append((a, pull))
    where = {n: i for i, row in enumerate(rows) for n in row}
    x: dict[str, float] = {}
    for row in rows:
        apart = [half[a] + half[b] + GAP for a, b in pairwise(row)]
        x |= dict(zip(row, spread([0.0] * len(row), [1.0] * len(row), apart), strict=True))
    for sweep in range(PLACINGS):
        side = (-1, 1, 0)[sweep % 3] if sweep < PLACINGS // 2 else 0
        for row in rows if sweep % 2 == 0 else reversed(rows):
            goals, weights = [], []
            for n in row:
                near = [(x[m], w) for m, w in pulls[n] if not side or where[m] - where[n] == side] or \
                    [(x[m], w) for m, w in pulls[n]]
                weight = sum(w for _, w in near)
                goals.append(sum(at * w for at, w in near) / weight if near else x[n])
                weights.append(weight or 0.1)
            gaps = [half[a] + half[b] + GAP for a, b in pairwise(row)]
            x |= dict(zip(row, spread(goals, weights, gaps), strict=True))
    left = min(x[n] - half[n] for n in half)
    return {n: at - left + MARGIN for n, at in x.items()}
