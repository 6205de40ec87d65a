"""The busiest rank of a reallocation, and the least that it can be: a linear program over all ways of sending, without
ranks that pass on between nodes what they received."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from rldsl.reshard.intra_node import NETWORK_COST
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.sharding.boxes import cell_of
from tests.realloc.cases import Case

Terms = dict[int, int]  # variable -> factor
Inside = tuple[int, tuple[int, ...], tuple[int, ...]]  # size of a line, who of a node holds it, who lacks it


def least(variables: int, equal: Sequence[tuple[Terms, int]], below: Sequence[tuple[Terms, int]]) -> float:
    """The least value of the last variable, all being at least 0."""
    def matrix(rows: Sequence[tuple[Terms, int]]) -> tuple[object, list[int] | None]:
        entries = [(i, v, f) for i, (terms, _) in enumerate(rows) for v, f in terms.items()]
        if not entries:
            return None, None
        at, of, factor = zip(*entries)
        return coo_array((factor, (at, of)), shape=(len(rows), variables)).tocsr(), [right for _, right in rows]

    a_eq, b_eq = matrix(equal)
    a_ub, b_ub = matrix(below)
    found = linprog(np.eye(variables)[-1], a_ub, b_ub, a_eq, b_eq, method="highs")
    assert found.success, found.message
    return float(found.fun)


def optimum(case: Case) -> float:
    """With a byte inside a node weighing 1 / NETWORK. Sources are the nearest; into a node without holders each element
    comes once, to any that lack it, and is given to the others from there."""
    p = case.paths()
    have = {r: cell_of(case.src, case.src_mesh, r) for r in case.ranks()}
    want = {r: cell_of(case.dst, case.dst_mesh, r) for r in case.ranks()}
    inside: dict[int, list[Inside]] = defaultdict(list)
    equal: list[tuple[Terms, int]] = []
    sent: dict[int, Terms] = defaultdict(dict)
    count = 0
    for line in p.classes:
        hold = [r for r in have if have[r] in line.holders]
        lack: dict[int, list[int]] = defaultdict(list)
        for r, at in want.items():
            if at in line.needers and r not in hold:
                lack[r // case.devices].append(r)
        for node, needers in lack.items():
            near = tuple(r % case.devices for r in hold if r // case.devices == node)
            inside[node].append((line.size, near, tuple(r % case.devices for r in needers)))
        away = sum(all(h // case.devices != node for h in hold) for node in lack)
        if away:
            for r in hold:
                sent[r][count + hold.index(r)] = 1
            equal.append((dict.fromkeys(range(count, count + len(hold)), 1), line.size * away))
            count += len(hold)
    egress = least(count + 1, equal, [({**terms, count: -1}, 0) for terms in sent.values()]) if equal else 0.0
    return max([egress, *(_node(found) for found in set(map(tuple, inside.values())))])


def _node(found: tuple[Inside, ...]) -> float:
    equal: list[tuple[Terms, int]] = []
    out: dict[int, Terms] = defaultdict(dict)
    far: dict[int, Terms] = defaultdict(dict)
    need: Counter[int] = Counter()
    count = 0
    for size, hold, lack in found:
        need.update(dict.fromkeys(lack, size))
        takers = hold or lack
        for who in takers:
            out[who][count] = 1 if hold else len(lack) - 1
            if not hold:
                far[who][count] = 1
            count += 1
        equal.append((dict.fromkeys(range(count - len(takers), count), 1), size * (len(lack) if hold else 1)))
    below = [({**terms, count: -NETWORK_COST}, 0) for terms in out.values()]
    below += [({**terms, count: -1}, 0) for terms in far.values()]
    below += [({**dict.fromkeys(far[who], -1), count: -NETWORK_COST}, -amount) for who, amount in need.items()]
    return least(count + 1, equal, below)


def links(case: Case) -> tuple[Counter[int], ...]:
    """What each rank sends over the network, receives over it, sends inside its node, receives there."""
    p = case.paths()
    found = tuple(Counter[int]() for _ in range(4))
    for rank in case.ranks():
        for side, lanes in enumerate(rank_slices(p, rank)):
            for lane in lanes:
                near = lane.peer // case.devices == rank // case.devices
                found[2 * near + side][rank] += lane.stop - lane.start
    return found


def busiest(case: Case) -> float:
    out, came, given, got = (max(c.values(), default=0) for c in links(case))
    return max(out, came, given / NETWORK_COST, got / NETWORK_COST)
