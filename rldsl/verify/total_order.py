"""Order: the lists of all ranks increase in one total order, so that nobody waits for ever.

In: tables. Out: diagnostics RL0511 (a circle of events that wait for each other) and RL0512 (a list in another order
than the body). Blocking events: an event ends only when all of its participants are at it (rendezvous). If one total
order exists in which every list increases, the smallest unfinished event can always run, for its participants have
done all that comes before it; a cycle in the union of the lists is a deadlock. The search for cycles looks at the
lists alone and not at the body. Loops: each list runs the body's blocks in the body's order, so events of one
iteration never mix with those of another, and checking one iteration is enough.

RL0512 is stricter than the absence of cycles: two events that the same ranks alone take part in could stand in any
order, but communicators are independent only if every rank issues on all of them in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rldsl.diag import Diagnostic
from rldsl.plan.events import Event
from rldsl.verify.rank_sets import Ranks, union
from rldsl.verify.tables import Tables, class_ranks, name, problem, say

List = tuple[int, ...]  # event ids
Edges = Mapping[int, Mapping[int, List]]  # event -> the event right after it in some list -> that list


def check_total_order(t: Tables) -> Iterator[Diagnostic]:
    events: dict[int, Event] = {e.id: e for e, _ in t.events}
    holders: dict[List, list[Ranks]] = defaultdict(list)
    for c in t.plan.classes:
        known = tuple(id for id in dict.fromkeys(c.events) if id in events)
        holders[known].append(class_ranks(c, t.plan.header.world))
    lists = {order: union(sets) for order, sets in holders.items()}
    if found := circle(lists):
        yield _deadlock([(events[id], lists[order]) for id, order in found])
        return
    place = {e.id: i for i, (e, _) in enumerate(t.events)}
    for order, ranks in lists.items():
        for a, b in pairwise(order):
            if place[a] > place[b]:
                yield problem("RL0512",
                              f"a rank class runs event {a} before event {b}, but the plan lists them in the opposite "
                              "order",
                              events[a], events[b], ranks=ranks)


def _deadlock(around: Sequence[tuple[Event, Ranks]]) -> Diagnostic:
    """around: events, each with the ranks that run it before the next one of the circle. Those ranks are at it and
    wait there for the ranks that are still at the one before."""
    notes = []
    for (before, others), (event, ranks) in zip([around[-1], *around], around, strict=False):
        notes.append(f"ranks {say(ranks)} wait at {name(event)} for ranks {say(others)}, which are at event "
                     f"{before.id}")
    return problem("RL0511", "deadlock: these events wait for each other in a cycle", *(e for e, _ in around),
                   ranks=union(r for _, r in around), notes=notes,
                   help="all ranks must execute these events in the same order")


def _edges(lists: Iterable[List]) -> Edges:
    edges: dict[int, dict[int, List]] = defaultdict(dict)
    for order in lists:
        for a, b in pairwise(order):
            edges[a].setdefault(b, order)
    return edges


def circle(lists: Iterable[List]) -> list[tuple[int, List]]:
    """Kahn's algorithm. The events of one cycle, each with the list in which it stands before the next of them; nothing
    when there is no cycle."""
    edges = _edges(lists)
    waits = Counter(b for following in edges.values() for b in following)
    ready = deque(id for id in edges if not waits[id])
    left = set(edges) | set(waits)
    while ready:
        id = ready.popleft()
        left.discard(id)
        for b in edges.get(id, ()):
            waits[b] -= 1
            if not waits[b]:
                ready.append(b)
    return _turns(_around(left, edges), edges) if left else []


def _around(left: set[int], edges: Edges) -> list[int]:
    """A cycle among `left`, where every event has a predecessor: walk backwards until one comes again."""
    before = {b: a for a in sorted(left) for b in edges.get(a, ()) if b in left}
    seen: dict[int, int] = {}
    at = min(left)
    while at not in seen:
        seen[at] = len(seen)
        at = before[at]
    walked = sorted(seen, key=seen.__getitem__)[seen[at] :]
    return walked[::-1]


def _turns(cycle: Sequence[int], edges: Edges) -> list[tuple[int, List]]:
    """Only the events at which the cycle passes from one list to another; those between stand in the list anyway."""
    steps = [(a, edges[a][b]) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    return [step for last, step in zip([steps[-1], *steps], steps, strict=False) if last[1] != step[1]]
