"""One total order of events, in which meshes that share no rank run side by side.

In: a draft whose blocks are in program order. Out: the same events, each block ordered by list scheduling (Graham 1969)
on a rough clock: of the events whose inputs are ready, the one that can start first comes first; at equal times
movement, then program order. So a realloc that only needs last step's parameters stands at the top, and a transfer
never stands between two calls that could run at the same time. Invariant: reads follow writes, a buffer is overwritten
only after its readers, and a model's new version (by a train or a sync) comes after the calls that use the old one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, all_spread, events, uses
from rldsl.passes.list_scheduling import Task, list_schedule
from rldsl.plan.events import Event, Every, Item, Loop
from rldsl.plan.model import Value
from rldsl.plan.traits import Family

PRIORITY: Mapping[Family, int] = {  # at equal times: movement, work, whole blocks, logs
    "data": 0, "movement": 0, "call": 1, "compute": 1, "residency": 1, "disk": 1, "bookkeeping": 3}
BLOCK_PRIORITY = 2


@dataclass(frozen=True, slots=True)
class _Job:
    """What an item (an event, or a whole block) needs, makes, and keeps busy."""

    needs: frozenset[str]
    makes: frozenset[str]
    ranks: frozenset[int]
    cost: int
    priority: int  # at equal times; of `PRIORITY`


def order(draft: Draft) -> Draft:
    values = draft.values
    whole = {f: all_spread(draft, f) for f in draft.frames}
    return replace(draft, body=_block(draft, draft.body, values, whole))


def _block(draft: Draft, items: tuple[Item, ...], values: Mapping[str, Value],
           whole: Mapping[str, str]) -> tuple[Item, ...]:
    inner = tuple(replace(i, body=_block(draft, i.body, values, whole)) if isinstance(i, Every | Loop) else i
                  for i in items)
    jobs = [_job(draft, i, values, whole) for i in inner]
    return tuple(inner[i] for i in schedule(jobs))


def _job(draft: Draft, item: Item, values: Mapping[str, Value], whole: Mapping[str, str]) -> _Job:
    own = list(events([item]))
    priority = PRIORITY[item.traits.family] if isinstance(item, Event) else BLOCK_PRIORITY
    versions = [e.versions() for e in own]
    return _Job(frozenset(b for e in own for b in uses(draft, e, values, whole)).union(*(v.uses for v in versions)),
                frozenset(b for e in own for b in e.writes).union(*(v.defs for v in versions)),
                frozenset(r for m in {e.mesh for e in own} for r in draft.ranks(m)),
                sum(e.traits.order_cost for e in own), priority)


def dependencies(jobs: Sequence[_Job]) -> list[set[int]]:
    """For each job the earlier ones that must come before it: writers of what it needs, readers of what it makes."""
    writer: dict[str, int] = {}
    readers: dict[str, set[int]] = defaultdict(set)
    before: list[set[int]] = []
    for i, job in enumerate(jobs):
        mine = {writer[b] for b in job.needs | job.makes if b in writer}
        mine |= {r for b in job.makes for r in readers[b]}
        before.append(mine - {i})
        for b in job.makes:
            writer[b] = i
            readers[b] = set()
        for b in job.needs - job.makes:
            readers[b].add(i)
    return before


def schedule(jobs: Sequence[_Job]) -> list[int]:
    """Indices of `jobs` in the order found."""
    before = dependencies(jobs)
    try:
        return list_schedule([Task(job.ranks, before[i], job.cost, job.priority) for i, job in enumerate(jobs)])
    except ValueError:
        raise internal_error("the events of a block wait for each other in a cycle", "pass order") from None


def check_order(before: Draft, after: Draft) -> None:
    """In every block nothing is lost or doubled, and what depends on something still comes after it."""
    whole = {f: all_spread(before, f) for f in before.frames}
    _check(before, before.body, after.body, before.values, whole)


def _check(draft: Draft, was: tuple[Item, ...], now: tuple[Item, ...], values: Mapping[str, Value],
           whole: Mapping[str, str]) -> None:
    names = [_name(i) for i in was]
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, item in enumerate(now):
        places[_name(item)].append(at)
    if sorted(names) != sorted(map(_name, now)):
        raise internal_error("ordering lost or duplicated an event", "pass order")
    places = {name: found[::-1] for name, found in places.items()}
    moved = [places[name].pop() for name in names]  # equal items stay in their order
    for at, earlier in zip(moved, dependencies([_job(draft, i, values, whole) for i in was]), strict=True):
        if any(moved[i] >= at for i in earlier):
            raise internal_error(f"ordering put {names[moved.index(at)]} before an event that it needs", "pass order")
    for item, at in zip(was, moved, strict=True):
        if isinstance(item, Every | Loop):
            _check(draft, item.body, now[at].body, values, whole)  # type: ignore[union-attr]  # equal names: a block too


def _name(item: Item) -> tuple[str, ...]:
    """The same for an item before and after its own blocks are ordered."""
    return (type(item).__name__, *sorted(map(repr, events([item]))))
