"""Order: the lists of all ranks increase in one total order, so that no rank waits forever.

In: tables. Out: diagnostics RL0511 (a cycle of events that wait for each other) and RL0512 (a list in another order
than the body). Events block: one ends only when all of its participants have reached it (rendezvous). If there is a
total order in which every list increases, the smallest unfinished event can always run, because its participants have
finished everything before it; a cycle in the union of the lists is a deadlock. The search for cycles reads the lists
alone, and not the body. Loops: each list runs the body's blocks in the body's order, so events of one iteration never
mix with those of another, and checking one iteration is enough.

RL0512 is stricter than the absence of cycles: two events with the same participants could be in either order, but
communicators are independent only if every rank issues on all of them in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rldsl.diag import Diagnostic
from rldsl.plan.events import Event
from rldsl.sharding.rank_sets import Ranks, union
from rldsl.verify.tables import Tables, class_ranks, name, problem, ranks_label

EventIds = tuple[int, ...]  # the list of a rank
Edges = Mapping[int, Mapping[int, EventIds]]  # event -> the event right after it in some list -> that list


def check_total_order(t: Tables) -> Iterator[Diagnostic]:
    events: dict[int, Event] = {e.id: e for e, _ in t.events}
    holders: dict[EventIds, list[Ranks]] = defaultdict(list)
    for c in t.plan.classes:
        existing = tuple(id for id in dict.fromkeys(c.events) if id in events)
        holders[existing].append(class_ranks(c, t.plan.header.world))
    lists = {order: union(sets) for order, sets in holders.items()}
    if cycle := find_cycle(lists):
        yield _deadlock([(events[id], lists[order]) for id, order in cycle])
        return
    position = {e.id: i for i, (e, _) in enumerate(t.events)}
    for order, ranks in lists.items():
        for a, b in pairwise(order):
            if position[a] > position[b]:
                yield problem("RL0512",
                              f"a rank class runs event {a} before event {b}, but the plan lists them in the opposite "
                              "order",
                              events[a], events[b], ranks=ranks)


def _deadlock(cycle: Sequence[tuple[Event, Ranks]]) -> Diagnostic:
    """cycle: events, each with the ranks that run it before the next one of the cycle. Those ranks wait at it for the
    ranks that are still at the one before."""
    notes = []
    for (before, others), (event, ranks) in zip([cycle[-1], *cycle], cycle, strict=False):
        notes.append(f"ranks {ranks_label(ranks)} wait at {name(event)} for ranks {ranks_label(others)}, "
                     f"which are at event {before.id}")
    return problem("RL0511", "deadlock: these events wait for each other in a cycle", *(e for e, _ in cycle),
                   ranks=union(r for _, r in cycle), notes=notes,
                   help="all ranks must execute these events in the same order")


def _edges(lists: Iterable[EventIds]) -> Edges:
    edges: dict[int, dict[int, EventIds]] = defaultdict(dict)
    for order in lists:
        for a, b in pairwise(order):
            edges[a].setdefault(b, order)
    return edges


def find_cycle(lists: Iterable[EventIds]) -> list[tuple[int, EventIds]]:
    """One cycle of events that wait for each other, found with Kahn's algorithm: each event with a list that has it
    before the next one. Empty if there is none."""
    edges = _edges(lists)
    num_before = Counter(b for following in edges.values() for b in following)
    ready = deque(id for id in edges if not num_before[id])
    left = set(edges) | set(num_before)
    while ready:
        id = ready.popleft()
        left.discard(id)
        for b in edges.get(id, ()):
            num_before[b] -= 1
            if not num_before[b]:
                ready.append(b)
    return _where_lists_change(_cycle_among(left, edges), edges) if left else []


def _cycle_among(left: set[int], edges: Edges) -> list[int]:
    """A cycle among `left`, where every event has a predecessor: walk backwards until an event comes again."""
    before = {b: a for a in sorted(left) for b in edges.get(a, ()) if b in left}
    seen: dict[int, int] = {}
    at = min(left)
    while at not in seen:
        seen[at] = len(seen)
        at = before[at]
    walked = sorted(seen, key=seen.__getitem__)[seen[at] :]
    return walked[::-1]


def _where_lists_change(cycle: Sequence[int], edges: Edges) -> list[tuple[int, EventIds]]:
    """The events of a cycle at which it changes from one list to another; those in between follow from the list."""
    steps = [(a, edges[a][b]) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
    return [step for last, step in zip([steps[-1], *steps], steps, strict=False) if last[1] != step[1]]
