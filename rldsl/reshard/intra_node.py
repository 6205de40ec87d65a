"""Inside a node: by which of its devices lines come in over the network, and who gives what to whom.

In: the lines that the devices of a node hold and lack. Out: a `Kind`, without trees yet. There may be thousands of
lines and of kinds (a model divided among all ranks), so what can be is summed up for all lines of the same devices.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rldsl.reshard.load_balance import Share, balance, cut
from rldsl.reshard.node_groups import Places
from rldsl.reshard.records import Entering, Hop, Kind, fan, handed, taken

NETWORK = 8  # a byte between nodes costs at least as much as this many inside one (H100: 450 to 50 GB/s)

Devices = tuple[int, ...]  # of a node, ascending


@dataclass(frozen=True, slots=True)
class Wants:
    """What the devices of a node lack. away: of lines that no device holds, those that the same devices want, in the
    order in which these take them. inside: of each other line, by number, the devices that hold and that lack it."""

    away: Mapping[Devices, Sequence[int]]
    inside: Mapping[int, tuple[Devices, Devices]]


@dataclass(frozen=True, slots=True)
class Way:
    """How lines come to devices that lack them. wanted: lines by these devices. shares: of each line, the devices to
    which it comes. taken: what comes to each device, of all lines of the same devices together."""

    wanted: Mapping[Devices, Sequence[int]]
    shares: Mapping[int, Sequence[Share]]
    taken: Mapping[Devices, Mapping[int, int]]

    def entering(self) -> dict[int, Entering]:
        return dict(sorted((i, Entering(needers, tuple(self.shares[i])))
                           for needers, found in self.wanted.items() for i in found))


def kind_of(sizes: Sequence[int], nodes: tuple[int, ...], places: Places, wants: Wants) -> Kind:
    """Of the ways in which lines may come into the nodes, the one that makes the busiest device least busy. sizes: of
    all lines."""
    ways = [_way(sizes, wants.away, {}, 0)]
    if wants.away and wants.inside:  # those who send much inside the node may receive less from outside
        ways.append(_way(sizes, wants.away, _sent(_direct(sizes, wants.inside, {}, {})), 1))
    made = [(way, _hops(sizes, wants.inside, way)) for way in ways]
    way, hops = min(made, key=lambda x: _busy(*x)) if len(made) > 1 else made[0]  # `_busy` takes its time
    return Kind(nodes, places, way.entering(), hops, len(nodes))


def _busy(way: Way, hops: Sequence[Hop]) -> int:
    """Of the busiest device of a node, with bytes of the network weighed by what they cost more than others."""
    sent, near, far = _sent(hops) + handed(way.taken), Counter[int](), Counter[int]()
    for hop in hops:
        near[hop.dst] += hop.stop - hop.start
    for needers, parts in way.taken.items():
        near.update(dict.fromkeys(needers, sum(parts.values())))
        for who, size in parts.items():
            far[who] += size
            near[who] -= size * (who in needers)
    return max((*near.values(), *sent.values(), *(NETWORK * x for x in far.values())), default=0)


def _way(sizes: Sequence[int], wanted: Mapping[Devices, Sequence[int]], loads: Mapping[int, int], fewer: int) -> Way:
    """The parts in which lines come to devices that lack them: balanced by what each gets (fewer: 0) or by what it then
    gives to the others (1). loads: what it sends or gets besides."""
    weights = {needers: max(1, (len(needers) - 1) ** fewer) for needers in wanted}
    totals = {needers: sum(sizes[i] for i in found) * weights[needers] for needers, found in wanted.items()}
    shares: dict[int, list[Share]] = {i: [] for found in wanted.values() for i in found}
    came: dict[Devices, Counter[int]] = {}
    for needers, amounts in balance(totals, loads).items():
        weight, mine = weights[needers], came.setdefault(needers, Counter())
        for i, (who, start, stop) in cut(((i, sizes[i] * weight) for i in wanted[needers]), amounts):
            if (start := start // weight) < (stop := stop // weight):
                shares[i].append(Share(needers[who], start, stop))
                mine[needers[who]] += stop - start
    return Way(wanted, shares, came)


def _hops(sizes: Sequence[int], inside: Mapping[int, tuple[Devices, Devices]], way: Way) -> tuple[Hop, ...]:
    """From holders straight to all that lack a line; or, if that makes the busiest device less busy, handed out in
    parts wherever more lack a line than hold it."""
    loads = handed(way.taken)
    few = [i for i, (hold, lack) in inside.items() if len(hold) < len(lack)]
    direct = tuple(_direct(sizes, inside, loads, {}))
    if not few:
        return direct
    need = Counter[int]()
    for i, (_, lack) in inside.items():
        need.update(dict.fromkeys(lack, sizes[i]))
    for needers, parts in way.taken.items():
        need.update(dict.fromkeys(needers, sum(parts.values())))
    if _busiest(loads, direct) <= max(need.values()):
        return direct
    lacked: dict[Devices, list[int]] = defaultdict(list)
    for i in few:
        lacked[inside[i][1]].append(i)
    divided = _way(sizes, lacked, {}, 0)
    second = [h for i, e in divided.entering().items() for h in fan(i, e, 1)]
    relayed = (*_direct(sizes, inside, loads + _sent(second), divided.shares), *second)
    return relayed if _busiest(loads, relayed) < _busiest(loads, direct) else direct


def _direct(sizes: Sequence[int], inside: Mapping[int, tuple[Devices, Devices]], loads: Mapping[int, int],
            divided: Mapping[int, Sequence[Share]]) -> Iterator[Hop]:
    """Hops of step 0. divided: of lines of which every device gets its part only."""
    lists: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = defaultdict(list)  # (device, line, start, stop)
    for i, (hold, lack) in inside.items():
        parts = divided[i] if i in divided else [Share(d, 0, sizes[i]) for d in lack]
        lists[hold] += [(who, i, start, stop) for who, start, stop in parts]
    shares = balance({hold: sum(stop - start for *_, start, stop in found) for hold, found in lists.items()}, loads)
    for hold, amounts in shares.items():
        for (device, i, start, _), part in cut(((x, x[3] - x[2]) for x in sorted(lists[hold])), amounts):
            yield Hop(0, i, hold[part.who], device, start + part.start, start + part.stop)


def _sent(hops: Iterable[Hop]) -> Counter[int]:
    sent: Counter[int] = Counter()
    for hop in hops:
        sent[hop.src] += hop.stop - hop.start
    return sent


def _busiest(loads: Counter[int], hops: Iterable[Hop]) -> int:
    return max((loads + _sent(hops)).values(), default=0)


def arriving(kind: Kind) -> Counter[int]:
    """Elements that come to each device over the network."""
    found = Counter[int]()
    for parts in taken(kind.entering.values()).values():
        found.update(parts)
    return found
