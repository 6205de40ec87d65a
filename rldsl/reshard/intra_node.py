"""Inside a node: through which devices box classes enter over the network, and who sends what to whom.

In: the classes that the devices of a node hold and lack. Out: a `NodeGroup`, still without trees. There may be
thousands of classes and groups (a model divided over all ranks), so whatever is equal for classes that the same devices
lack is computed once for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rldsl.reshard.load_balance import Share, balance, cut_at
from rldsl.reshard.node_groups import CellPairs
from rldsl.reshard.records import Arrival, IntraNodeCopy, NodeGroup, arrivals_by_device, fan_out, forwarded_by_device

NETWORK_COST = 8  # a byte between nodes costs at least as much as 8 inside one (H100: 450 against 50 GB/s)

Devices = tuple[int, ...]  # of a node, ascending


@dataclass(frozen=True, slots=True)
class Needs:
    """What the devices of a node lack."""

    remote: Mapping[Devices, Sequence[int]]  # classes that no device of the node holds, by the devices that lack them
    local: Mapping[int, tuple[Devices, Devices]]  # any other class: the devices that hold it, and those that lack it


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """Through which devices classes reach all devices that lack them."""

    wanted: Mapping[Devices, Sequence[int]]  # classes, by the devices that lack them
    shares: Mapping[int, Sequence[Share]]  # per class: which device receives which part
    arrived: Mapping[Devices, Mapping[int, int]]  # elements that each device receives, as `arrivals_by_device` has it

    def arrivals(self) -> dict[int, Arrival]:
        return dict(sorted((i, Arrival(needers, tuple(self.shares[i])))
                           for needers, found in self.wanted.items() for i in found))


def node_group(sizes: Sequence[int], nodes: tuple[int, ...], cells: CellPairs, wants: Needs) -> NodeGroup:
    """The record of a group of nodes. Of the arrival plans tried, the one whose busiest device has the least to do.
    sizes: elements of every class."""
    plans = [_arrival_plan(sizes, wants.remote, {}, 0)]
    if wants.remote and wants.local:  # devices that send much inside the node may receive less from outside
        plans.append(_arrival_plan(sizes, wants.remote, _sent(_direct_copies(sizes, wants.local, {}, {})), 1))
    candidates = [(plan, _local_copies(sizes, wants.local, plan)) for plan in plans]
    # `_busiest_device` is slow, so it runs only if there is a choice
    plan, copies = min(candidates, key=lambda x: _busiest_device(*x)) if len(candidates) > 1 else candidates[0]
    return NodeGroup(nodes, cells, plan.arrivals(), copies, len(nodes))


def _busiest_device(plan: ArrivalPlan, copies: Sequence[IntraNodeCopy]) -> int:
    """The load of the busiest device of a node, where a byte over the network counts `NETWORK_COST` times."""
    sent, near, far = _sent(copies) + forwarded_by_device(plan.arrived), Counter[int](), Counter[int]()
    for copy in copies:
        near[copy.dst] += copy.stop - copy.start
    for needers, parts in plan.arrived.items():
        near.update(dict.fromkeys(needers, sum(parts.values())))
        for who, size in parts.items():
            far[who] += size
            near[who] -= size * (who in needers)
    return max((*near.values(), *sent.values(), *(NETWORK_COST * x for x in far.values())), default=0)


def _arrival_plan(sizes: Sequence[int], wanted: Mapping[Devices, Sequence[int]], loads: Mapping[int, int],
                  fewer: int) -> ArrivalPlan:
    """In which parts classes reach the devices that lack them: balanced by what each device receives (fewer: 0) or by
    what it then forwards to the others (1). loads: what a device sends or receives besides."""
    weights = {needers: max(1, (len(needers) - 1) ** fewer) for needers in wanted}
    totals = {needers: sum(sizes[i] for i in found) * weights[needers] for needers, found in wanted.items()}
    shares: dict[int, list[Share]] = {i: [] for found in wanted.values() for i in found}
    arrived: dict[Devices, Counter[int]] = {}
    for needers, amounts in balance(totals, loads).items():
        weight, received = weights[needers], arrived.setdefault(needers, Counter())
        for i, (who, start, stop) in cut_at(((i, sizes[i] * weight) for i in wanted[needers]), amounts):
            if (start := start // weight) < (stop := stop // weight):
                shares[i].append(Share(needers[who], start, stop))
                received[needers[who]] += stop - start
    return ArrivalPlan(wanted, shares, arrived)


def _local_copies(sizes: Sequence[int], inside: Mapping[int, tuple[Devices, Devices]],
                  plan: ArrivalPlan) -> tuple[IntraNodeCopy, ...]:
    """Copies from holders directly to all devices that lack a class; or, where more devices lack a class than hold it
    and it lightens the busiest device, in parts that the receivers then exchange."""
    loads = forwarded_by_device(plan.arrived)
    few = [i for i, (hold, lack) in inside.items() if len(hold) < len(lack)]
    direct = tuple(_direct_copies(sizes, inside, loads, {}))
    if not few:
        return direct
    need = Counter[int]()
    for i, (_, lack) in inside.items():
        need.update(dict.fromkeys(lack, sizes[i]))
    for needers, parts in plan.arrived.items():
        need.update(dict.fromkeys(needers, sum(parts.values())))
    if _busiest_sender(loads, direct) <= max(need.values()):
        return direct
    lacked: dict[Devices, list[int]] = defaultdict(list)
    for i in few:
        lacked[inside[i][1]].append(i)
    divided = _arrival_plan(sizes, lacked, {}, 0)
    second = [h for i, e in divided.arrivals().items() for h in fan_out(i, e, 1)]
    relayed = (*_direct_copies(sizes, inside, loads + _sent(second), divided.shares), *second)
    return relayed if _busiest_sender(loads, relayed) < _busiest_sender(loads, direct) else direct


def _direct_copies(sizes: Sequence[int], inside: Mapping[int, tuple[Devices, Devices]], loads: Mapping[int, int],
            divided: Mapping[int, Sequence[Share]]) -> Iterator[IntraNodeCopy]:
    """Copies of step 0. divided: for classes of which every device first gets only its part."""
    lists: dict[tuple[int, ...], list[tuple[int, int, int, int]]] = defaultdict(list)  # (device, class, start, stop)
    for i, (hold, lack) in inside.items():
        parts = divided[i] if i in divided else [Share(d, 0, sizes[i]) for d in lack]
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
    received = Counter[int]()
    for parts in arrivals_by_device(group.arrivals.values()).values():
        received.update(parts)
    return received
