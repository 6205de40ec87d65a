"""One total order of events, in which meshes that share no rank run side by side.

In: a draft whose blocks are in program order. Out: the same events, each block ordered by list scheduling (Graham 1969)
on a rough clock: of the events whose inputs are ready, the one that can start first comes first; at equal times
movement, then program order. So a realloc that only needs the last step's parameters is at the top, and a transfer is
never between two calls that could run at the same time. Invariant: reads follow writes, a buffer is overwritten
only after its readers, and a model's new version (by a train or a sync) comes after the calls that use the old one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rldsl.diag import internal_error
from rldsl.passes.draft import Draft, LengthsSpreads, events, uses
from rldsl.passes.list_scheduling import Task, list_schedule
from rldsl.plan.events import Event, Item, Loop, When, split_buffer
from rldsl.plan.model import Value
from rldsl.plan.traits import Family
from rldsl.sharding.rank_sets import group_equal_ranks

PRIORITY: Mapping[Family, int] = {  # at equal times: movement, work, whole blocks, logs
    "data": 0, "movement": 0, "call": 1, "compute": 1, "residency": 1, "disk": 1, "bookkeeping": 3}
BLOCK_PRIORITY = 2


@dataclass(frozen=True, slots=True)
class _Job:
    """What an item (an event, or a whole block) needs, makes, and keeps busy."""

    needs: frozenset[str]  # what must exist before it runs
    makes: frozenset[str]  # what exists once it has run
    ranks: frozenset[int]  # one of each set of ranks that are in the same meshes
    cost: int  # clock ticks that it takes
    priority: int  # at equal times; of `PRIORITY`


def order(draft: Draft) -> Draft:
    values = draft.values
    return replace(draft, body=_block(draft, draft.body, values, LengthsSpreads.of(draft)))


def _block(draft: Draft, items: tuple[Item, ...], values: Mapping[str, Value],
           lengths_in: LengthsSpreads, in_loop: bool = False) -> tuple[Item, ...]:
    """in_loop: whether the block is in a loop of a step."""
    inner = tuple(replace(i, body=_block(draft, i.body, values, lengths_in, in_loop or isinstance(i, Loop)))
                  if isinstance(i, When | Loop) else i for i in items)
    jobs = _jobs(draft, inner, values, lengths_in)
    begun = _movement_of_earlier_iterations(inner, jobs) if draft.placed.graph.lag and not in_loop else frozenset()
    return tuple(inner[i] for i in schedule(jobs, begun))


def _movement_of_earlier_iterations(items: Sequence[Item], jobs: Sequence[_Job]) -> frozenset[int]:
    """The indices of the movements that bring what an earlier iteration has made. They come first: ranks that generate
    would otherwise begin with the next rows, and those that train wait for these."""
    found = set[int]()
    for i, before in enumerate(dependencies(jobs)):
        item = items[i]
        if isinstance(item, Event) and item.traits.family == "movement" and before <= found:
            found.add(i)
    return frozenset(found)


def _jobs(draft: Draft, items: Sequence[Item], values: Mapping[str, Value],
          lengths_in: LengthsSpreads) -> list[_Job]:
    """What each item of a block needs, makes and keeps busy. One rank stands for all that are in the same meshes, since
    they are busy at the same time."""
    meshes = {e.mesh: draft.ranks(e.mesh) for e in events(items)}
    firsts = defaultdict[str, set[int]](set)  # mesh -> the first of each such ranks
    for inside, ranks in group_equal_ranks(meshes, draft.placed.world).items():
        for mesh in inside:
            firsts[mesh].add(ranks.first)
    lasting = draft.lasting
    return [_job(draft, item, values, lengths_in, firsts, lasting) for item in items]


def _job(draft: Draft, item: Item, values: Mapping[str, Value], lengths_in: LengthsSpreads,
         firsts: Mapping[str, set[int]], lasting: frozenset[str]) -> _Job:
    own = list(events([item]))

    def in_iteration(e: Event, buffers: Iterable[str]) -> list[str]:
        """Buffers by the steps, counted from the iteration's, whose values they hold: another step has another
        buffer."""
        return [f"{b} {e.ahead}" if split_buffer(b)[0] in values and b not in lasting else b for b in buffers]

    priority = PRIORITY[item.traits.family] if isinstance(item, Event) else BLOCK_PRIORITY
    versions = [e.versions() for e in own]
    needed = frozenset(b for e in own for b in in_iteration(e, uses(draft, e, values, lengths_in)))
    return _Job(needed.union(*(v.uses for v in versions)),
                frozenset(b for e in own for b in in_iteration(e, e.writes)).union(*(v.defs for v in versions)),
                frozenset(r for m in {e.mesh for e in own} for r in firsts[m]),
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


def schedule(jobs: Sequence[_Job], begun: frozenset[int] = frozenset()) -> list[int]:
    """Indices of `jobs` in the order found. begun: those that come before all others."""
    before = dependencies(jobs)
    out: list[int] = []
    try:
        for part in (sorted(begun), [i for i in range(len(jobs)) if i not in begun]):
            index = {i: k for k, i in enumerate(part)}
            tasks = [Task(jobs[i].ranks, [index[b] for b in before[i] if b in index], jobs[i].cost, jobs[i].priority)
                     for i in part]
            out += [part[k] for k in list_schedule(tasks)]
        return out
    except ValueError:
        raise internal_error("the events of a block wait for each other in a cycle", "pass order") from None


def check_order(before: Draft, after: Draft) -> None:
    """In every block nothing is lost or doubled, and what depends on something still comes after it."""
    _check(before, before.body, after.body, before.values, LengthsSpreads.of(before))


def _check(draft: Draft, was: tuple[Item, ...], now: tuple[Item, ...], values: Mapping[str, Value],
           lengths_in: LengthsSpreads) -> None:
    fingerprints = [_fingerprint(i) for i in was]
    positions: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for at, item in enumerate(now):
        positions[_fingerprint(item)].append(at)
    if sorted(fingerprints) != sorted(map(_fingerprint, now)):
        raise internal_error("ordering lost or duplicated an event", "pass order")
    # match old items with new ones by content; equal items keep their order
    remaining = {fingerprint: found[::-1] for fingerprint, found in positions.items()}
    new_index = [remaining[fingerprint].pop() for fingerprint in fingerprints]
    for at, earlier in zip(new_index, dependencies(_jobs(draft, was, values, lengths_in)), strict=True):
        if any(new_index[i] >= at for i in earlier):
            raise internal_error(f"ordering put {fingerprints[new_index.index(at)]} before an event that it needs",
                                 "pass order")
    for item, at in zip(was, new_index, strict=True):
        moved = now[at]
        if isinstance(item, When | Loop) and isinstance(moved, When | Loop):  # both or neither
            _check(draft, item.body, moved.body, values, lengths_in)


def _fingerprint(item: Item) -> tuple[str, ...]:
    """All events of an item. It is the same before and after the item's own blocks are ordered."""
    return (type(item).__name__, *sorted(map(repr, events([item]))))
