"""The whole of a reallocation, written out piece by piece for all ranks: slow and plain, to compare `rank_lanes` with.

What is chosen (which device takes which share, how many trees and senders) is read from the `Paths`; who sends what to
whom is walked through in full here, without formulas.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.reshard.records import NodeGroup, ReshardPlan, TransferSlice
from rldsl.sharding.boxes import Cell, cell_of
from tests.realloc.cases import Case

Flow = tuple[int, int, int, int, int, int]  # sender, receiver, step, line, start, stop


def flows(case: Case) -> list[Flow]:
    """Every piece of every rank, sorted."""
    p = case.paths()
    found: list[Flow] = []
    roots: list[tuple[int, int, NodeGroup, list[int]]] = []  # (group, tree, ...): the nodes of each pair of trees
    for q, group in enumerate(p.groups):
        groups: dict[int, list[int]] = {}
        for at, node in enumerate(group.nodes):
            groups.setdefault(at * group.num_trees // len(group.nodes), []).append(node)
        for i, nodes in groups.items():
            roots.append((q, i, group, nodes))
            found += _group(p, group, nodes)
    found += _from_holders(case, p, roots)
    return sorted(found)


def _group(p: ReshardPlan, group: NodeGroup, nodes: list[int]) -> Iterator[Flow]:
    """What the nodes of one pair of trees do among themselves."""
    for node in nodes:
        base = node * p.devices
        for copy in group.local_copies:
            yield base + copy.src, base + copy.dst, copy.step, copy.box_class, copy.start, copy.stop
    for tree in range(2 if len(nodes) > 1 else 1):
        for node, above, depth in _tree(nodes, tree):
            for line, device, start, stop in _halves(group, tree, len(nodes) > 1):
                if above is not None:
                    yield above * p.devices + device, node * p.devices + device, depth, line, start, stop
                for other in group.arrivals[line].needers:
                    if other != device:
                        yield node * p.devices + device, node * p.devices + other, depth + 1, line, start, stop


def _halves(group: NodeGroup, tree: int, two: bool) -> Iterator[tuple[int, int, int, int]]:
    for line, entering in group.arrivals.items():
        for device, start, stop in entering.received_parts:
            middle = (start + stop) // 2 if two else stop
            start, stop = ((start, middle), (middle, stop))[tree]
            if start < stop:
                yield line, device, start, stop


def _tree(nodes: list[int], tree: int) -> list[tuple[int, int | None, int]]:
    """(node, the one above, depth), by recursion: the label with the most factors of two stands at the top."""
    out: list[tuple[int, int | None, int]] = []

    def build(low: int, high: int, above: int | None, depth: int) -> None:
        if low <= high:
            top = max(range(low, high + 1), key=lambda x: x & -x)
            node = nodes[(top - 1 + tree) % len(nodes)]
            out.append((node, above, depth))
            build(low, top - 1, node, depth + 1)
            build(top + 1, high, node, depth + 1)

    build(1, len(nodes), None, 0)
    return out


def _from_holders(case: Case, p: ReshardPlan, roots: list[tuple[int, int, NodeGroup, list[int]]]) -> Iterator[Flow]:
    """Each cell lays all that it sends end to end; its senders take equal stretches, element by element."""
    for at in sorted(p.senders):
        holders = [r for r in case.src_mesh.members() if cell_of(case.src, case.src_mesh, r) == at]
        senders = [holders[k * len(holders) // p.senders[at].num_senders] for k in range(p.senders[at].num_senders)]
        sent = [x for root in roots for x in _of_cell(p, at, *root)]
        total = sum(stop - start for *_, start, stop in sent)
        assert total == p.senders[at].size
        k = position = 0
        for receiver, line, start, stop in sent:
            begin = start
            for element in range(start, stop):
                while position >= total * (k + 1) // len(senders):
                    if begin < element:
                        yield senders[k], receiver, 0, line, begin, element
                    begin, k = element, k + 1
                position += 1
            yield senders[k], receiver, 0, line, begin, stop


def _of_cell(p: ReshardPlan, at: Cell, q: int, i: int, group: NodeGroup, nodes: list[int]) -> list[tuple[int, int, int, int]]:
    out = []
    for tree in range(2 if len(nodes) > 1 else 1):
        root = next(node for node, above, _ in _tree(nodes, tree) if above is None)
        for line, device, start, stop in _halves(group, tree, len(nodes) > 1):
            for who, low, high in p.sent_parts[line]:
                if p.classes[line].holders[who] == at and max(low, start) < min(high, stop):
                    out.append((tree, device, line, max(low, start), min(high, stop), root))
    return [(root * p.devices + device, line, start, stop) for _, device, line, start, stop, root in sorted(out)]


def of_rank(found: list[Flow], rank: int) -> tuple[tuple[TransferSlice, ...], tuple[TransferSlice, ...]]:
    sends = sorted(TransferSlice(step, b, line, start, stop) for a, b, step, line, start, stop in found if a == rank)
    receives = sorted(TransferSlice(step, a, line, start, stop) for a, b, step, line, start, stop in found if b == rank)
    return tuple(sends), tuple(receives)
