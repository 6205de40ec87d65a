"""Classes and order: every rank's list is its part of the body, and the lists together cannot deadlock.

In: tables. Out: diagnostics RL0541-RL0543 (classes), RL0511 (deadlock), RL0512 (order). Blocking events: an event ends
only when all of its participants are at it (rendezvous). If one total order exists in which every list increases, the
smallest unfinished event can always run; a cycle in the union of the lists is a deadlock. The cycle check looks at the
lists alone and not at the body. Loops: each list runs the body's blocks in the body's order, so events of one
iteration never mix with those of another and checking one iteration is enough.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import pairwise

from rldsl.diag import Diagnostic
from rldsl.plan.events import Event
from rldsl.plan.verify.tables import Tables, class_ranks, name, problem, say


def check(t: Tables) -> Iterator[Diagnostic]:
    found = [*_cover(t), *_lists(t)]
    yield from found
    cycle = _cycle([c.events for c in t.plan.classes])
    by_id = {e.id: e for e, _ in t.events}
    known = [by_id[id] for id in cycle if id in by_id]
    if known:
        ranks = frozenset().union(*(t.event_ranks(e) for e in known))
        yield problem(
            "RL0511",
            "deadlock: these events wait for each other in a circle",
            *known,
            ranks=ranks,
            help="every rank must meet these events in one common order",
        )
    elif not found:
        yield from _order(t)


def _cover(t: Tables) -> Iterator[Diagnostic]:
    """Each rank of the world in exactly one class."""
    world = t.plan.header.world
    count: Counter[int] = Counter()
    for c in t.plan.classes:
        if c.peak_bytes < 0:
            yield problem("RL0543", f"a class has peak_bytes {c.peak_bytes}", ranks=class_ranks(c, world))
        if any(not 0 <= a < b <= world for a, b in c.ranks):
            yield problem("RL0541", f"a class has ranks {c.ranks}, which are not ranks of the world of {world}")
        count.update(class_ranks(c, world))
    if missing := [r for r in range(world) if not count[r]]:
        yield problem("RL0541", f"no class contains rank {say(missing)}", ranks=missing)
    if twice := [r for r in range(world) if count[r] > 1]:
        yield problem("RL0541", f"more than one class contains rank {say(twice)}", ranks=twice)


def _lists(t: Tables) -> Iterator[Diagnostic]:
    """A class lists exactly the events whose mesh contains its ranks, each once."""
    by_id = {e.id: e for e, _ in t.events}
    for c in t.plan.classes:
        ranks = class_ranks(c, t.plan.header.world)
        listed = Counter(c.events)
        for id, count in listed.items():
            if id not in by_id:
                yield problem("RL0542", f"a class lists event {id}, which the plan does not have", ranks=ranks)
            elif count > 1:
                yield problem("RL0542", f"a class lists {name(by_id[id])} {count} times", by_id[id], ranks=ranks)
        members = frozenset(ranks)
        for event, _ in t.events:
            inside = t.event_ranks(event)
            if event.id in listed and not members <= inside:
                yield problem(
                    "RL0542",
                    f"{name(event)} is listed by ranks that are not on its mesh {event.mesh}",
                    event,
                    ranks=members - inside,
                )
            elif event.id not in listed and members & inside:
                yield problem(
                    "RL0542",
                    f"{name(event)} is not listed by ranks of its mesh {event.mesh}: the others "
                    "would wait for them for ever",
                    event,
                    ranks=members & inside,
                )


def _cycle(lists: list[tuple[int, ...]]) -> list[int]:
    """Kahn's algorithm on the union of the lists' successive pairs; the ids along one cycle, or nothing."""
    after: dict[int, set[int]] = defaultdict(set)
    waits: Counter[int] = Counter()
    for order in set(lists):
        for a, b in pairwise(order):
            if b not in after[a]:
                after[a].add(b)
                waits[b] += 1
    ready = deque(id for id in after if not waits[id])
    left = set(after) | set(waits)
    while ready:
        id = ready.popleft()
        left.discard(id)
        for b in after.get(id, ()):
            waits[b] -= 1
            if not waits[b]:
                ready.append(b)
    return _around(left, after) if left else []


def _around(left: set[int], after: dict[int, set[int]]) -> list[int]:
    """A cycle among `left`, where every event has a predecessor: walk backwards until one comes again."""
    before = {b: a for a in sorted(left) for b in after.get(a, ()) if b in left}
    seen: dict[int, int] = {}
    at = min(left)
    while at not in seen:
        seen[at] = len(seen)
        at = before[at]
    walked = sorted(seen, key=seen.__getitem__)[seen[at] :]
    return walked[::-1]


def _order(t: Tables) -> Iterator[Diagnostic]:
    """The list is the body's order: what the runtime walks and what the plan shows must be one thing."""
    place = {e.id: i for i, (e, _) in enumerate(t.events)}
    events: dict[int, Event] = {e.id: e for e, _ in t.events}
    for c in t.plan.classes:
        for a, b in pairwise(c.events):
            if place[a] > place[b]:
                yield problem(
                    "RL0512",
                    f"a class runs event {a} before event {b}, the body the other way round",
                    events[a],
                    events[b],
                    ranks=class_ranks(c, t.plan.header.world),
                )
