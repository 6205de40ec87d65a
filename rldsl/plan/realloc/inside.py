"""Inside a node: by which of its devices lines come in over the network, and who gives what to whom.

In: the lines that the devices of a node hold and lack. Out: a `Kind`, without trees yet.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rldsl.plan.realloc.lines import Line
from rldsl.plan.realloc.nodes import Places
from rldsl.plan.realloc.records import Entering, Hop, Kind, fan, given
from rldsl.plan.realloc.share import Share, balance, cut

NETWORK = 8  # a byte between nodes costs at least as much as this many inside one (H100: 450 to 50 GB/s)

Wants = Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]  # line -> devices of the node that hold, and that lack it


def kind_of(every: Sequence[Line], nodes: tuple[int, ...], places: Places, wants: Wants) -> Kind:
    """Of the ways in which lines may come into the nodes, the one that makes the busiest device least busy."""
    away = {i: lack for i, (hold, lack) in wants.items() if not hold}
    inside = {i: both for i, both in wants.items() if both[0]}
    ways = [_entering(every, away, {}, 0)]
    if away and inside:  # those who send much inside the node may receive less from outside
        ways.append(_entering(every, away, _sent(_direct(every, inside, {}, {})), 1))
    made = [Kind(nodes, places, way, _hops(every, inside, way), len(nodes)) for way in ways]
    return min(made, key=_busy) if len(made) > 1 else made[0]  # `_busy` is most of the work


def _busy(kind: Kind) -> int:
    """Of the busiest device of a node, with bytes of the network weighed by what they cost more than others."""
    far, sent, near = arriving(kind), _sent(kind.hops) + _handed(kind.entering), Counter[int]()
    for hop in kind.hops:
        near[hop.dst] += hop.stop - hop.start
    for e in kind.entering.values():
        whole = sum(stop - start for _, start, stop in e.shares)
        for needer in e.needers:
            near[needer] += whole
        for who, start, stop in e.shares:
            near[who] -= (stop - start) * (who in e.needers)
    return max((*near.values(), *sent.values(), *(NETWORK * x for x in far.values())), default=0)


def _handed(entering: Mapping[int, Entering]) -> Counter[int]:
    """What devices give to others of what comes by them."""
    found: Counter[int] = Counter()
    for e in entering.values():
        for who, size in given(e):
            found[who] += size
    return found


def _entering(every: Sequence[Line], lack: Mapping[int, tuple[int, ...]], loads: Mapping[int, int],
              fewer: int) -> dict[int, Entering]:
    """The parts in which lines come to devices that lack them: balanced by what each gets (fewer: 0) or by what it then
    gives to the others (1). loads: what it sends or gets besides."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, needers in lack.items():
        alike[needers].append(i)
    weights = {needers: max(1, (len(needers) - 1) ** fewer) for needers in alike}
    sizes = {needers: sum(every[i].size for i in found) * weights[needers] for needers, found in alike.items()}
    shares: dict[int, list[Share]] = {i: [] for i in lack}
    for needers, amounts in balance(sizes, loads).items():
        weight = weights[needers]
        together = sorted(alike[needers], key=lambda i: (_shards(every[i]), i))  # a device hears from few holders
        for i, (who, start, stop) in cut(((i, every[i].size * weight) for i in together), amounts):
            if start // weight < stop // weight:
                shares[i].append(Share(needers[who], start // weight, stop // weight))
    return {i: Entering(needers, tuple(shares[i])) for i, needers in lack.items()}


def _shards(line: Line) -> tuple[tuple[int, int, int], ...]:
    """The holders of a line, those of a shard of the rows together: all of them hold what is not divided otherwise."""
    return tuple((c.stage, c.shard, c.part) for c in line.have)


def _hops(every: Sequence[Line], inside: Wants, entering: Mapping[int, Entering]) -> tuple[Hop, ...]:
    """From holders straight to all that lack a line; or, if that makes the busiest device less busy, handed out in
    parts wherever more lack a line than hold it."""
    loads = _handed(entering)
    need: Counter[int] = Counter()
    for i, lack in [*((i, lack) for i, (_, lack) in inside.items()), *((i, e.needers) for i, e in entering.items())]:
        need.update(dict.fromkeys(lack, every[i].size))
    few = {i: lack for i, (hold, lack) in inside.items() if len(hold) < len(lack)}
    direct = tuple(_direct(every, inside, loads, {}))
    if not few or _busiest(loads, direct) <= max(need.values()):
        return direct
    handed = _entering(every, few, {}, 0)
    second = [h for i, e in handed.items() for h in fan(i, e, 1)]
    relayed = (*_direct(every, inside, loads + _sent(second), handed), *second)
    return relayed if _busiest(loads, relayed) < _busiest(loads, direct) else direct


def _direct(every: Sequence[Line], inside: Wants, loads: Mapping[int, int],
            handed: Mapping[int, Entering]) -> Iterator[Hop]:
    """Hops of step 0. handed: lines of which every device gets its part only."""
    lists: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = defaultdict(list)  # (device, line, start, stop)
    for i, (hold, lack) in inside.items():
        parts = handed[i].shares if i in handed else [Share(d, 0, every[i].size) for d in lack]
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
    found: Counter[int] = Counter()
    for entering in kind.entering.values():
        for who, start, stop in entering.shares:
            found[who] += stop - start
    return found
