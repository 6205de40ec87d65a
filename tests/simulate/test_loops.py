"""Loops and `every`s inside a step: how often what happens, and a loop of a million turns in no time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rldsl.plan.events import Item, Loop, Realloc, When
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths, last_step, times
from rldsl.simulate import Lengths, simulate
from rldsl.simulate.engine import Compute, EventBegin, LoopBegin, RepeatExtrapolated, Timelines, run_programs
from rldsl.simulate.iterations import iteration_kinds
from rldsl.simulate.model import Timeline
from rldsl.simulate.summary import format_timeline
from tests.effort import calls
from tests.simulate import plans
from tests.simulate.plans import ROUND

known = cache(plans.plan)


def with_first(wrap) -> tuple[Plan, Realloc]:
    """The plan with its first reallocation inside something else, and that event."""
    plan = known("real")
    steps = plan.body[-1]
    assert isinstance(steps, Loop)
    first = next(e for e in steps.body if isinstance(e, Realloc))
    body = tuple(wrap(e) if e is first else e for e in steps.body)
    return replace(plan, body=(*plan.body[:-1], replace(steps, body=body))), first


# -------------------------------------------------------------------------------------------------- turns

COUNTS = st.integers(1, 6)
PERIODS = st.recursive(st.just(()), lambda inner: st.lists(st.one_of(
    st.builds(When, COUNTS, inner), st.builds(When, st.just(1), inner, COUNTS), st.builds(When, st.just(1), inner,
    st.just(0), COUNTS)), max_size=3).map(tuple), max_leaves=6)


def runs(body: tuple[Item, ...], turn: int, path: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """The paths of the blocks that run in a turn, one by one as the language says it."""
    return tuple(p for i, e in enumerate(body) if isinstance(e, When) and turn % e.period == 0 and turn > e.after
                 and (not e.first or turn <= e.first) for p in ((*path, i), *runs(e.body, turn, (*path, i))))


def counted(path: tuple[When, ...], trips: int) -> list[int]:
    """The turns in which an event inside these blocks runs."""
    return [turn for turn in range(1, trips + 1) if all(block.runs(turn) for block in path)]


@given(st.lists(st.builds(When, COUNTS, st.just(()), st.integers(0, 9), st.integers(0, 12)), max_size=3),
       st.integers(1, 30))
def test_turns_of_nested_blocks_are_counted(blocks: list[When], trips: int) -> None:
    one_by_one, path = counted(tuple(blocks), trips), (Loop("steps", trips, ()), *blocks)
    assert times(path) == len(one_by_one) and last_step(path) == max(one_by_one, default=0)


@given(PERIODS, st.integers(1, 40))
def test_kinds_of_turns_are_all_turns(body: tuple[Item, ...], trips: int) -> None:
    one_by_one = Counter(runs(body, turn) for turn in range(1, trips + 1))
    assert one_by_one == sum((Counter({runs(body, k.number): k.simulated + k.left}) for k in iteration_kinds(Loop("r", trips, body))),
                             Counter())


def test_many_periods_are_no_burden() -> None:
    loop = Loop("r", 10**8, tuple(When(p, ()) for p in range(2, 24)))
    assert sum(k.simulated + k.left for k in iteration_kinds(loop)) == 10**8
    assert calls(lambda: iteration_kinds(loop)) < 10**6


# ------------------------------------------------------------------------------------------------- engine


def played(programs) -> Timelines:
    return run_programs(programs, [0] * len(programs))


def test_the_rest_of_a_loop_lasts_as_long_as_its_last_turn() -> None:
    begin = EventBegin(7, 0, 0)
    found = played([[LoopBegin(1), begin, Compute(2.0), Compute(1.0, 0.5), RepeatExtrapolated(1, 9, {7: 1}), EventBegin(-1, 0, 0), Compute(1.0)]])
    assert found.ends == [31.0]
    assert [(m.event, m.iteration, at) for m, at in found.begins[0]] == [(7, 0, 0.0), (7, 1, 3.0), (-1, 0, 30.0)]
    assert [(p.start, p.stop, p.busy) for p in found.intervals[0]] == [
        (0, 2, 2), (2, 3, 0.5), (3, 21, 18), (21, 30, 4.5), (30, 31, 1)]


def test_loops_in_loops() -> None:
    inner = [LoopBegin(2), EventBegin(1, 0, 0), Compute(1.0), RepeatExtrapolated(2, 4, {1: 1})]
    assert played([[LoopBegin(1), *inner, Compute(5.0), RepeatExtrapolated(1, 99, {1: 5})]]).ends == [1000.0]


@pytest.mark.parametrize("ops", [[LoopBegin(1), RepeatExtrapolated(1, 10**9, {})], [LoopBegin(1), Compute(0.0), RepeatExtrapolated(1, 5, {})]])
def test_a_turn_that_takes_no_time(ops: list) -> None:
    assert played([ops]).ends == [0.0]


# -------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("trips, inside", [(2, 1), (9, 1), (20, 3), (12, 2)])
def test_a_loop_takes_what_its_turns_take(trips: int, inside: int) -> None:
    """As many reallocations as the plan says, and as long as if each were written down."""
    plan, first = with_first(lambda e: Loop("r", trips, (When(inside, (e,)) if inside > 1 else e,)))
    count = {e.id: times(path) for e, path in event_paths(plan)}[first.id] // plan.header.steps
    assert count == trips // inside
    written, found = simulate(with_first(lambda e: Loop("r", 1, (e,) * count))[0], ROUND), simulate(plan, ROUND)
    assert found.seconds == pytest.approx(written.seconds, rel=0.01)
    assert found.event_seconds()[first.id] == pytest.approx(written.event_seconds()[first.id], rel=0.05)


def test_an_every_in_a_repeat_counts_its_turns() -> None:
    """It is part of each step, and no occasion of some."""
    plan, _ = with_first(lambda e: Loop("r", 4, (When(2, (e,)),)))
    found, twice = simulate(plan, ROUND), simulate(with_first(lambda e: Loop("r", 2, (e,)))[0], ROUND)
    assert found.seconds == pytest.approx(twice.seconds, rel=0.02)
    assert [o.period for o in found.periodic] == [2]  # the save alone


def test_an_every_that_never_comes_takes_no_time() -> None:
    plan, first = with_first(lambda e: Loop("r", 3, (When(4, (e,)),)))
    assert first.id not in simulate(plan, ROUND).event_seconds()


def test_ten_million_turns() -> None:
    found: list[Timeline] = []
    hundred, millions = (calls(lambda: found.append(simulate(with_first(
        lambda e: Loop("r", n, (e, When(3, ()))))[0], ROUND))) for n in (100, 10**7))
    few, many = found
    assert millions < 1.2 * hundred
    rest = simulate(known("real"), ROUND).seconds
    assert (many.seconds - rest) / (few.seconds - rest) == pytest.approx(10**5, rel=0.05)
    assert sum(h.stop - h.start for h in many.critical) == pytest.approx(many.seconds)
    for c in range(len(many.classes)):
        mine = [s for s in many.spans if s.rank_class == c]
        assert all(a.stop == pytest.approx(b.start) for a, b in zip(mine, mine[1:]))
        assert all(s.busy <= (s.stop - s.start) * (1 + 1e-9) + 1e-9 for s in mine)


def test_an_every_in_an_every_comes_when_both_do() -> None:
    plan, first = with_first(lambda e: When(2, (When(3, (e,)),)))
    found = [o for o in simulate(plan, ROUND).periodic if first.id in o.events]
    assert [o.period for o in found] == [6] and found[0].seconds > 0


def test_what_comes_now_and_then_has_a_name() -> None:
    plan, first = with_first(lambda e: When(5, (e,)))
    (line,) = [x for x in format_timeline(plan, simulate(plan, ROUND), ROUND, Lengths(), "x").splitlines() if "every 5" in x]
    assert f"realloc {first.model}" in line and "()" not in line
