"""The analysis against a world that is played out: ranks walk the plan under rendezvous semantics, some stand still at
some moment, the others go on until none can; then the analysis must name exactly those that stand still and are waited
for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.plan.events import Event, When, Item, Loop
from rldsl.plan.projection import schedule
from rldsl.postmortem.analysis import analyze, rank_traces
from rldsl.postmortem.dumps import EventRun, RankPosition
from rldsl.postmortem.wait_order import WaitOrder
from tests.postmortem.hand import PLAN, dump, partners, sign

ORDER, WORLD, STEPS = WaitOrder(PLAN), 8, 3


def unrolled(items: Sequence[Item], turns: tuple[int, ...] = ()) -> Iterator[tuple[Event, EventRun]]:
    for item in items:
        if isinstance(item, Event):
            yield item, EventRun(item.id, turns)
        elif isinstance(item, When):
            if item.runs(turns[-1]):
                yield from unrolled(item.body, turns)
        else:
            assert isinstance(item, Loop)
            for turn in range(1, min(item.trips, STEPS) + 1):
                yield from unrolled(item.body, (*turns, turn))


@dataclass
class Walker:
    """done: events that it has ended; posted: what it has on its way, by buffer."""

    rank: int
    own: list[tuple[Event, EventRun]]
    done: int = 0
    inside: bool = False

    @property
    def at(self) -> EventRun | None:
        return self.own[self.done][1] if self.done < len(self.own) else None

    def begun(self) -> set[EventRun]:
        return {moment for _, moment in self.own[: self.done + self.inside]}


def awaited(walker: Walker) -> tuple[Event, EventRun] | None:
    """What the event that it is in reads and an earlier one posted, if it has to wait for that."""
    event, _ = walker.own[walker.done]
    for earlier, moment in reversed(walker.own[: walker.done]):
        if earlier.traits.blocking == "async" and set(earlier.writes) & set(event.reads):
            return earlier, moment
    return None


def stands_still(walkers: list[Walker], still: dict[int, int]) -> list[Walker]:
    """still: rank -> how many events it ends; it begins one more."""
    moved = True
    while moved:
        moved = False
        begun = [w.begun() for w in walkers]
        for w in walkers:
            if w.at is None:
                continue
            if not w.inside:
                w.inside = moved = True
                continue
            if w.done == still.get(w.rank) or waits(w, begun):
                continue
            w.done, w.inside, moved = w.done + 1, False, True
    return walkers


def waits(w: Walker, begun: list[set[EventRun]]) -> set[int]:
    """The ranks without which it cannot go on; what it reads must have come before it can do anything with others."""
    event, moment = w.own[w.done]
    needs = [found] if (found := awaited(w)) else []
    needs += [(event, moment)] if event.traits.blocking not in ("none", "async", "gather") else []
    lacks = ({q for q in partners(ORDER, e, w.rank) if at not in begun[q]} for e, at in needs)
    return next((ranks for ranks in lacks if ranks), set())


def position_of(w: Walker, begun: list[set[EventRun]]) -> RankPosition:
    if w.at is None:
        return RankPosition(w.own[-1][1], "over", 1.0)
    posted = awaited(w)
    if posted and any(posted[1] not in begun[q] for q in partners(ORDER, posted[0], w.rank)):
        return RankPosition(w.at, "waits", 1.0, posted[1], "", "wait")
    return RankPosition(w.at, "begins", 1.0, None, "", "all_reduce" if waits(w, begun) else "")


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.integers(0, WORLD - 1), st.integers(0, 20), min_size=1, max_size=2), st.booleans())
def test_whoever_stands_still_is_found(still: dict[int, int], silent: bool) -> None:
    walkers = [Walker(r, list(unrolled(schedule(PLAN.body, PLAN.meshes, r)))) for r in range(WORLD)]
    still = {r: min(n, len(walkers[r].own) - 1) for r, n in still.items()}
    stands_still(walkers, still)
    begun = [w.begun() for w in walkers]
    stuck = {w.rank for w in walkers if w.at is not None and w.done == still.get(w.rank) and not waits(w, begun)}
    positions = [position_of(w, begun) for w in walkers]
    dumps = {r: dump(r, s) for r, s in enumerate(positions) if not (silent and r in stuck)}
    signs = {r: sign(r, positions[r]) for r in range(WORLD) if r not in dumps}
    findings = analyze(PLAN, rank_traces(WORLD, dumps, signs))
    over = any(w.at is None for w in walkers)
    needed = {q for w in walkers for q in (waits(w, begun) if w.at is not None else ())}
    assert {c.rank for c in findings.culprits} == {r for r in stuck if silent or over or r in needed}
    for wait in findings.waits:  # what it says is so
        assert wait.kind == "end" or all(wait.at not in begun[q] for q in wait.on) == (wait.kind == "not reached")
    for w in walkers:
        told = [q for wait in findings.waits if w.rank in wait.ranks for q in wait.on]
        assert bool(told) == (w.rank not in stuck), "all others wait, at least at the end of the run"
