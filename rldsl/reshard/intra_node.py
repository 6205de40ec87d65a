"""Inside a node: through which devices box classes enter over the network, and who sends what to whom.

In: the classes that the devices of a node hold and lack. Out: a `NodeGroup`, still without trees. There may be
thousands of classes and groups (a model divided over all ranks), so whatever is equal for classes that the same devices
lack is computed once for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rldsl.reshard.arrivals import (
    NO_ARRIVALS,
    Arrivals,
    IntraNodeCopy,
    Wanted,
    WantedList,
    fan_out,
    forwarded_by_device,
)
from rldsl.reshard.load_balance import Share, balance, cut_at
from rldsl.reshard.node_groups import CellPairs
from rldsl.reshard.records import NodeGroup

PARTS = 16  # into which the way between two plans of arrivals is divided, to try plans on it
NETWORK_COST = 8  # a byte between nodes costs at least as much as 8 inside one (H100: 450 against 50 GB/s)

Devices = tuple[int, ...]  # of a node, ascending


@dataclass(frozen=True, slots=True)
class Needs:
    """What the devices of a node lack."""

    wanted: Wanted  # whether held or not
    held: tuple[tuple[int, ...], ...]  # per list of `wanted`: positions of the classes that a device of the node holds
    local: Mapping[int, tuple[Devices, Devices]]  # of these: the devices that hold it, and those that lack it, if any


def node_group(sizes: Sequence[int], nodes: tuple[int, ...], cells: CellPairs, wants: Needs) -> NodeGroup:
    """The record of a group of nodes. Of the arrival plans tried, the one whose busiest device has the least to do.
    sizes: elements of every class."""
    plan = _arrivals(wants.wanted, wants.held, {}, by_forwarding=False)
    copies = _local_copies(sizes, wants.local, plan)
    # no plan receives less over the network, but devices that send much inside the node may have to receive less
    if plan and wants.local and _busiest_device(plan, copies) > NETWORK_COST * max(_received(plan).values()):
        loads = _sent(_direct_copies(sizes, wants.local, {}, NO_ARRIVALS))
        forwarding = _arrivals(wants.wanted, wants.held, loads, by_forwarding=True)
        # the largest load is a convex function of the amounts, so it may be smaller between the two
        others = [forwarding, *(_between(plan, forwarding, part) for part in range(1, PARTS))]
        candidates = [(plan, copies), *((other, _local_copies(sizes, wants.local, other)) for other in others)]
        plan, copies = min(candidates, key=lambda x: _busiest_device(*x))
    return NodeGroup(nodes, cells, plan, copies, len(nodes))


def _received(arrivals: Arrivals) -> Counter[int]:
    received = Counter[int]()
    for parts in arrivals.by_device.values():
        received.update(parts)
    return received


def _between(a: Arrivals, b: Arrivals, part: int) -> Arrivals:
    """The plan that is `part` of `PARTS` parts of the way from a to b, which are for the same lists."""
    return Arrivals(a.wanted, a.held, tuple(
        tuple(((PARTS - part) * x + part * y) // PARTS for x, y in zip(of_a, of_b, strict=True))
        for of_a, of_b in zip(a.bounds, b.bounds, strict=True)))


def _busiest_device(arrivals: Arrivals, copies: Sequence[IntraNodeCopy]) -> int:
    """The load of the busiest device of a node, where a byte over the network counts `NETWORK_COST` times."""
    arrived = arrivals.by_device
    sent, near, far = _sent(copies) + forwarded_by_device(arrived), Counter[int](), Counter[int]()
    for copy in copies:
        near[copy.dst] += copy.stop - copy.start
    for needers, parts in arrived.items():
        near.update(dict.fromkeys(needers, sum(parts.values())))
        for who, size in parts.items():
            far[who] += size
            near[who] -= size * (who in needers)
    return max((*near.values(), *sent.values(), *(NETWORK_COST * x for x in far.values())), default=0)


def _arrivals(wanted: Wanted, held: tuple[tuple[int, ...], ...], loads: Mapping[int, int], *,
              by_forwarding: bool) -> Arrivals:
    """In which parts classes enter a node: balanced by what each device receives, or (by_forwarding) by what it then
    forwards. loads: what a device sends or receives besides."""
    totals = {one.needers: one.ends[-1] - sum(one.sizes[position] for position in positions)
              for one, positions in zip(wanted.lists, held, strict=True)}
    # each part is forwarded to the other len(needers) - 1 devices
    weights = {needers: max(1, len(needers) - 1) if by_forwarding else 1 for needers in totals}
    amounts = balance({needers: total * weights[needers] for needers, total in totals.items() if total}, loads)
    # an element is not divided: a part ends at the last whole one
    return Arrivals(wanted, held, tuple(
        tuple(end // weights[needers] for end in accumulate(amounts.get(needers, (0,) * len(needers))))
        for needers in totals))


def _local_copies(sizes: Sequence[int], inside: Mapping[int, tuple[Devices, Devices]],
                  arrivals: Arrivals) -> tuple[IntraNodeCopy, ...]:
    """Copies from holders directly to all devices that lack a class; or, where more devices lack a class than hold it
    and it lightens the busiest device, in parts that the receivers then exchange."""
    if not inside:
        return ()
    arrived = arrivals.by_device
    loads = forwarded_by_device(arrived)
    few = [i for i, (hold, lack) in inside.items() if len(hold) < len(lack)]
    direct = tuple(_direct_copies(sizes, inside, loads, NO_ARRIVALS))
    if not few:
        return direct
    need = Counter[int]()
    for i, (_, lack) in inside.items():
        need.update(dict.fromkeys(lack, sizes[i]))
    for needers, parts in arrived.items():
        need.update(dict.fromkeys(needers, sum(parts.values())))
    if _busiest_sender(loads, direct) <= max(need.values()):
        return direct
    lacked: dict[Devices, list[int]] = defaultdict(list)
    for i in few:
        lacked[inside[i][1]].append(i)
    wanted = Wanted(tuple(WantedList(lack, tuple(found), tuple(sizes[i] for i in found))
                          for lack, found in lacked.items()))
    divided = _arrivals(wanted, ((),) * len(lacked), {}, by_forwarding=False)
    second = [copy for i, arrival in divided.items() for copy in fan_out(i, arrival, 1)]
    relayed = (*_direct_copies(sizes, inside, loads + _sent(second), divided), *second)
    return relayed if _busiest_sender(loads, relayed) < _busiest_sender(loads, direct) else direct


def _direct_copies(sizes: Sequence[int], inside: Mapping[int, tuple[Devices, Devices]], loads: Mapping[int, int],
                   divided: Arrivals) -> Iterator[IntraNodeCopy]:
    """Copies of step 0. divided: for classes of which every device first gets only its part."""
    lists: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = defaultdict(list)  # (device, class, start, stop)
    for i, (hold, lack) in inside.items():
        parts = divided[i].received_parts if i in divided else [Share(d, 0, sizes[i]) for d in lack]
        lists[hold] += [(who, i, start, stop) for who, start, stop in parts]
    shares = balance({hold: sum(stop - start for *_, start, stop in found) for hold, found in lists.items()}, loads)
    for hold, amounts in shares.items():
        for (device, i, start, _), part in cut_at(((x, x[3] - x[2]) for x in sorted(lists[hold])), amounts):
            yield IntraNodeCopy(0, i, hold[part.who], device, start + part.start, start + part.stop)


def _sent(copies: Iterable[IntraNodeCopy]) -> Counter[int]:
    """Elements that each device sends."""
    sent: Counter[int] = Counter()
    for copy in copies:
        sent[copy.src] += copy.stop - copy.start
    return sent


def _busiest_sender(loads: Counter[int], copies: Iterable[IntraNodeCopy]) -> int:
    return max((loads + _sent(copies)).values(), default=0)


def elements_arriving(group: NodeGroup) -> Counter[int]:
    """Elements that each device receives over the network."""
    return _received(group.arrivals)
