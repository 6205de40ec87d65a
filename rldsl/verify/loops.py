"""All ranks run a block the same number of times, and what depends on that number agrees with it.

In: tables with sound references. Out: diagnostics RL0536. A loop is one record, so its participants run the same number
of iterations, unless they do not agree on what ends it early: a condition that some of them do not hold. Also: exactly
one loop runs the number of steps of the header; a frame has as many iterations as the loop that collects into it;
and a model's learning rate is planned for as many updates as its train events make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rldsl.diag import Diagnostic
from rldsl.plan.events import Collect, Derive, Event, Fetch, Generate, Item, Loop, Train, split_buffer
from rldsl.plan.projection import times, walk
from rldsl.sharding.rank_sets import union
from rldsl.verify.tables import Tables, problem


def check_loops(t: Tables) -> Iterator[Diagnostic]:
    steps = [x for x in t.plan.body if isinstance(x, Loop)]
    if len(steps) != 1:
        yield problem("RL0536", f"the run has {len(steps) or 'no'} loop{'s' * (len(steps) > 1)} over steps")
    for loop in steps:
        if loop.trips != t.plan.header.steps:
            yield problem("RL0536",
                          f"loop {loop.id} runs {loop.trips} times, but the run has {t.plan.header.steps} steps")
    yield from _inside(t, t.plan.body)
    collected = {e.into for e, _ in t.events if isinstance(e, Collect)}
    made_of = {e.frame for e, _ in t.events if isinstance(e, Generate | Derive)}  # of rows that a loop collects
    made_of |= {f for e, _ in t.events if isinstance(e, Fetch) and e.newest for f in e.frames}
    valued = {t.values[v].frame for e, _ in t.events for v, _ in map(split_buffer, e.writes) if v in t.values}
    for f in t.frames.values():  # a frame that nothing reads has no values, and no loop collects it
        if f.iterations > 1 and f.id not in collected | made_of and f.id in valued:
            yield problem("RL0536", f"frame {f.id} has {f.iterations} iterations, but no loop collects it")
    made: Counter[str] = Counter()
    for e, path in t.events:
        if isinstance(e, Train):
            made[e.model] += times(path) * t.spreads[e.spread].minibatches * t.spreads[e.spread].epochs
    for m in t.plan.models:
        if m.planned_updates != made[m.name]:
            yield problem("RL0536",
                          f"model {m.name} is planned for {m.planned_updates} updates, but its "
                          f"events make {made[m.name]}")


def _inside(t: Tables, items: Sequence[Item]) -> Iterator[Diagnostic]:
    for item in items:
        if isinstance(item, Event):
            continue
        if isinstance(item, Loop):
            if item.until:
                yield from _until(t, item)
            for e in item.body:
                if isinstance(e, Collect) and t.frames[e.into].iterations != item.trips:
                    yield problem("RL0536",
                                  f"loop {item.id} runs {item.trips} times, but its collected frame has room for "
                                  f"{t.frames[e.into].iterations}", e)
        yield from _inside(t, item.body)


def _until(t: Tables, loop: Loop) -> Iterator[Diagnostic]:
    value, spread = split_buffer(loop.until)
    v, inside = t.values[value], [e for e, _ in walk(loop.body)]
    if (v.level, v.dtype) != ("batch", "bool"):
        yield problem("RL0536", f"loop {loop.id} ends on {value}, which is not a condition at the batch level",
                      *inside[:1])
    ranks = union(t.event_ranks(e) for e in inside)
    if t.spreads[spread].granularity != "all" or not ranks <= t.spread_ranks(spread):
        yield problem("RL0536", f"loop {loop.id} ends on {loop.until}, which some of its ranks do not have",
                      *inside[:1], ranks=ranks - t.spread_ranks(spread))
