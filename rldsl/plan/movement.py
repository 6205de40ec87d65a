"""Which boxes of a model's parameters travel between ranks when its layout changes.

In: a model and two layouts (or a layout and owners). Out: `Move`s, the same on every machine and in one order.
Invariants: every rank receives exactly the elements that it lacks, each once, and none that it has; every move lies
inside one piece of its source and one piece of its destination; sources are the nearest holders.

How: all parameters are cut into atoms, boxes that no piece crosses. Atoms with the same holders and needers form a
class; the classes are divided over their holders so that the busiest sender sends as little as possible. The bytes of
a class form a line, needer after needer, that is cut into one interval for each holder: a needer then hears from few
holders and at most one atom in each interval is cut in two.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

from rldsl.plan.boxes import (Box, Parameter, Piece, Share, contains, holding, intersect, itemsize, parameters, shares,
                              volume)
from rldsl.plan.model import Layout, Mesh, Model

SWEEPS = 32  # of balancing; most layouts need two


@dataclass(frozen=True, slots=True)
class Move:
    """`box` of parameter `name` goes from rank `src` to rank `dst`."""

    name: str
    box: Box
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class MoveSummary:
    """bytes: received by all ranks. messages: number of moves. busiest_bytes: the most that one rank sends or
    receives."""

    bytes: int
    messages: int
    busiest_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Each of `needers` lacks a box that every one of `holders` has."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]


# One box of one parameter, as it stands in the line of its class: (order, name, box).
Item = tuple[int, str, Box]


def realloc_moves(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                  devices_per_node: int) -> tuple[Move, ...]:
    """All moves that bring `model` from layout `src` to layout `dst`, in parameter order."""
    return _moves(model, lambda p: shares(p, model.layers, src, src_mesh),
                  lambda p: shares(p, model.layers, dst, dst_mesh), devices_per_node)


def gather_moves(model: Model, layout: Layout, mesh: Mesh, owners: Mapping[str, int],
                 devices_per_node: int = 1) -> tuple[Move, ...]:
    """All moves that make each parameter whole on its owner, for saving."""
    def whole(parameter: Parameter) -> tuple[Share, ...]:
        return (Share((Piece(_whole(parameter), 0),), (owners[parameter.name],)),)

    return _moves(model, lambda p: shares(p, model.layers, layout, mesh), whole, devices_per_node)


def owners(model: Model, layout: Layout, mesh: Mesh) -> dict[str, int]:
    """A rank for each parameter that is to have it whole: among its holders the one with the fewest bytes so far,
    largest parameters first."""
    load: Counter[int] = Counter()
    chosen: dict[str, int] = {}
    for size, parameter in sorted(((volume(_whole(p)), p) for p in parameters(model)), key=lambda x: -x[0]):
        holders = [r for share in shares(parameter, model.layers, layout, mesh) for r in share.ranks]
        owner = min(holders, key=lambda r: (load[r], r))
        load[owner] += size
        chosen[parameter.name] = owner
    return {p.name: chosen[p.name] for p in parameters(model)}


def local_copies(model: Model, src: Layout, src_mesh: Mesh, dst: Layout, dst_mesh: Mesh,
                 rank: int) -> tuple[tuple[str, Box], ...]:
    """What `rank` holds under both layouts. Each box lies inside one piece of either."""
    found = []
    for p in parameters(model):
        have = holding(p, model.layers, src, src_mesh, rank)
        want = holding(p, model.layers, dst, dst_mesh, rank)
        found += [(p.name, box) for w in want for h in have if (box := intersect(w.box, h.box)) is not None]
    return tuple(found)


def rank_moves(moves: Iterable[Move], rank: int) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """(sends, receives) of `rank`, in order."""
    moves = tuple(moves)
    return tuple(m for m in moves if m.src == rank), tuple(m for m in moves if m.dst == rank)


def stored(model: Model, layout: str) -> str:
    """The dtype of the parameters under a layout: what is trained stays float32 at its home."""
    return "float32" if model.home == layout else model.dtype


def carried(source: Model, src: str, model: Model, dst: str, decay: float) -> Model:
    """`model` in the dtype in which parameters of `source` under layout `src` travel to it under `dst`: the narrower of
    the two, but that of the source where a mean is taken."""
    both = (stored(source, src),) if decay else (stored(source, src), stored(model, dst))
    return replace(model, dtype="bfloat16" if "bfloat16" in both else "float32")


def summary(moves: Iterable[Move], model: Model) -> MoveSummary:
    """Totals in bytes of the model's dtype."""
    size, messages = itemsize(model), 0
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for m in moves:
        amount = volume(m.box) * size
        sent[m.src] += amount
        received[m.dst] += amount
        messages += 1
    busiest = max((*sent.values(), *received.values()), default=0)
    return MoveSummary(received.total(), messages, busiest)


def digest(moves: Iterable[Move]) -> str:
    """sha256 of one line for each move: "name start:stop,... src dst"."""
    total = hashlib.sha256()
    for m in moves:
        box = ",".join(f"{start}:{stop}" for start, stop in m.box)
        total.update(f"{m.name} {box} {m.src} {m.dst}\n".encode())
    return total.hexdigest()


# ---------------------------------------------------------------------------------------------------- atoms


def _whole(parameter: Parameter) -> Box:
    return tuple((0, n) for n in parameter.spec.shape)


def _moves(model: Model, have: Callable[[Parameter], tuple[Share, ...]],
           want: Callable[[Parameter], tuple[Share, ...]], devices_per_node: int) -> tuple[Move, ...]:
    atoms: dict[tuple[tuple[Share, ...], tuple[Share, ...]], tuple[tuple[Box, Demand], ...]] = {}
    classes: dict[Demand, list[Item]] = defaultdict(list)
    order = 0
    for parameter in parameters(model):
        sides = (have(parameter), want(parameter))
        if sides not in atoms:  # all layers between the same two stages move alike
            atoms[sides] = tuple(_atoms(*sides, devices_per_node))
        for box, demand in atoms[sides]:
            classes[demand].append((order, parameter.name, box))
            order += 1
    sizes = {demand: sum(volume(box) for _, _, box in items) for demand, items in classes.items()}
    loads = balance({d: size * len(d.needers) for d, size in sizes.items()})
    cut = [piece for demand, items in classes.items() for piece in _cut(demand, items, loads[demand])]
    cut.sort()
    return tuple(Move(name, box, src, dst) for _, dst, box, name, src in cut)


def _atoms(have: tuple[Share, ...], want: tuple[Share, ...], devices_per_node: int) -> Iterator[tuple[Box, Demand]]:
    """The boxes of one parameter that no piece crosses, with those who hold and those who lack each."""
    held = [(p.box, s.ranks) for s in have for p in s.pieces]
    wanted = [(p.box, s.ranks) for s in want for p in s.pieces]
    boxes = [box for box, _ in held + wanted]
    cuts = [sorted({end for box in boxes for end in box[d]}) for d in range(len(boxes[0]))]
    for box in product(*(tuple(pairwise(c)) for c in cuts)):
        holders = sorted({r for outer, ranks in held if contains(outer, box) for r in ranks})
        needers = sorted({r for outer, ranks in wanted if contains(outer, box) for r in ranks}.difference(holders))
        if needers:
            assert holders, f"nobody holds {box}"
        for demand in nearest(holders, needers, devices_per_node):
            yield box, demand


def nearest(holders: Sequence[int], needers: Sequence[int], devices_per_node: int) -> Iterator[Demand]:
    """Needers that have a holder on their own node ask there; the others ask all holders."""
    near: dict[int, list[int]] = defaultdict(list)
    for rank in holders:
        near[rank // devices_per_node].append(rank)
    asking: dict[int | None, list[int]] = defaultdict(list)
    for rank in needers:
        node = rank // devices_per_node
        asking[node if node in near else None].append(rank)
    for place, ranks in asking.items():
        yield Demand(tuple(holders if place is None else near[place]), tuple(ranks))


# ---------------------------------------------------------------------------------------------------- balance


def balance(sizes: Mapping[Demand, int]) -> dict[Demand, tuple[int, ...]]:
    """How much of each demand each of its holders sends, so that the busiest sends as little as possible.

    Filling the least loaded holders of one demand, with the loads of all others kept, lowers the sum of squared
    loads; a fixed point over all demands minimises it, and with it the largest load (load vectors form the base of a
    polymatroid; Fujishige 1980). Integers only, so that every machine finds the same."""
    loads: Counter[int] = Counter()
    shares = {demand: (0,) * len(demand.holders) for demand in sizes}
    order = sorted(sizes, key=lambda d: (len(d.holders), d.holders, d.needers))
    for _ in range(SWEEPS):
        before = dict(shares)
        for demand in order:
            others = [loads[r] - x for r, x in zip(demand.holders, shares[demand])]
            shares[demand] = fill(others, sizes[demand])
            loads.update({r: o + x - loads[r] for r, o, x in zip(demand.holders, others, shares[demand])})
        if shares == before:
            break
    return shares


def fill(loads: Sequence[int], amount: int) -> tuple[int, ...]:
    """`amount` poured onto `loads`, lowest first, until all that receive stand equally high (to within one)."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    total = amount
    for count, i in enumerate(order, 1):
        total += loads[i]
        if count == len(order) or total <= count * loads[order[count]]:
            break
    level, extra = divmod(total, count)
    added = [0] * len(loads)
    for position, i in enumerate(order[:count]):
        added[i] = level - loads[i] + (position < extra)
    return tuple(added)


def _cut(demand: Demand, items: Sequence[Item], amounts: Sequence[int]) -> Iterator[tuple[int, int, Box, str, int]]:
    """The line of a class cut at the running totals of `amounts`: (order, needer, box, name, holder)."""
    ends = list(accumulate(amounts))
    holder = at = 0
    for needer in demand.needers:
        for order, name, box in items:
            dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])  # the finest rows
            (start, stop), row = box[dim], volume(box) // (box[dim][1] - box[dim][0])
            while start < stop:
                rows = min(stop - start, (2 * (ends[holder] - at) + row) // (2 * row))
                if rows > 0:
                    part = box[:dim] + ((start, start + rows),) + box[dim + 1 :]
                    yield order, needer, part, name, demand.holders[holder]
                    start, at = start + rows, at + rows * row
                if start < stop:
                    holder += 1
