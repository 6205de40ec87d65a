"""Classes: every rank has one, and its list names each event that the rank takes part in exactly once.

In: tables. Out: diagnostics RL0541 (ranks without a class, or with several), RL0542 (a list names an event that its
ranks take no part in, or twice, or leaves one out), RL0543 (negative peak bytes). Of the ranks that belong to the same
meshes and classes, one is checked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from rldsl.diag import Diagnostic
from rldsl.plan.model import RankClass
from rldsl.sharding.rank_sets import Ranks, group_equal_ranks, union
from rldsl.verify.tables import Tables, class_ranks, name, problem


def check_class_schedules(t: Tables) -> Iterator[Diagnostic]:
    world, classes = t.plan.header.world, t.plan.classes
    for c in classes:
        yield from _class(c, world)
    expected: dict[frozenset[str], tuple[int, ...]] = {}
    missing: list[Ranks] = []
    twice: list[Ranks] = []
    wrong: dict[tuple[int, frozenset[str]], Ranks] = {}
    rank_sets: dict[str | int, Ranks] = {i: class_ranks(c, world) for i, c in enumerate(classes)}
    rank_sets.update(t.ranks)
    for members, ranks in group_equal_ranks(rank_sets, world).items():
        numbers = [i for i in members if isinstance(i, int)]
        meshes = frozenset(m for m in members if isinstance(m, str))
        if meshes not in expected:
            expected[meshes] = tuple(event.id for event, _ in t.events if event.mesh in meshes)
        if len(numbers) != 1:
            (twice if numbers else missing).append(ranks)
        wrong |= {(i, meshes): ranks for i in numbers if classes[i].events != expected[meshes]}
    if missing:
        yield problem("RL0541", "no rank class contains these ranks", ranks=union(missing))
    if twice:
        yield problem("RL0541", "several rank classes contain these ranks", ranks=union(twice))
    yield from _lists(t, wrong, expected)


def _class(c: RankClass, world: int) -> Iterator[Diagnostic]:
    ranks = class_ranks(c, world)
    if c.peak_bytes < 0:
        yield problem("RL0543", f"a rank class has peak_bytes {c.peak_bytes}", ranks=ranks)
    if not c.ranks or any(not 0 <= a < b <= world for a, b in c.ranks):
        yield problem("RL0541", f"a rank class has ranks {c.ranks}, which are outside the world of {world} ranks")
    elif sum(b - a for a, b in c.ranks) != len(ranks):
        yield problem("RL0541", f"a rank class has a rank twice: {c.ranks}")


def _lists(t: Tables, wrong: dict[tuple[int, frozenset[str]], Ranks],
           expected: dict[frozenset[str], tuple[int, ...]]) -> Iterator[Diagnostic]:
    """What is wrong with lists that differ from the expected ones. `total_order.py` checks their order."""
    by_id = {e.id: e for e, _ in t.events}
    found: dict[tuple[int, str], list[Ranks]] = defaultdict(list)
    for (i, meshes), ranks in wrong.items():
        listed, due = Counter(t.plan.classes[i].events), set(expected[meshes])
        for id, count in listed.items():
            if id not in by_id:
                found[id, f"a rank class lists event {id}, which does not exist"].append(ranks)
                continue
            event = by_id[id]
            if count > 1:
                found[id, f"a rank class lists {name(event)} {count} times"].append(ranks)
            if id not in due:
                found[id, f"{name(event)} is listed by ranks that are not on its mesh {event.mesh}"].append(ranks)
        for id in sorted(due - listed.keys()):
            event = by_id[id]
            title = f"{name(event)} is not listed by ranks of its mesh {event.mesh}: the other ranks would wait forever"
            found[id, title].append(ranks)
    for (id, title), sets in found.items():
        yield problem("RL0542", title, *([by_id[id]] if id in by_id else []), ranks=union(sets))
