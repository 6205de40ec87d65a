"""The engine on small programs whose timelines are worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.simulate.critical_path import find_critical_path
from rldsl.simulate.engine import Compute, Deadlock, EventBegin, Isend, Op, Pool, Timelines, Wait, run_programs

AT = EventBegin(0, 0, 0)


def intervals(played: Timelines, c: int) -> list[tuple[float, float, bool]]:
    """(start, stop, at work)"""
    return [(p.start, p.stop, p.key is None) for p in played.intervals[c]]


def collective(key: str, parties: tuple[int, ...], seconds: float = 0.0) -> list[Op]:
    return [Isend(key, parties, seconds), Wait(key)]


def test_work_comes_after_work() -> None:
    played = run_programs([[AT, Compute(1.0), Compute(2.0)], [AT]], [0, 0])
    assert intervals(played, 0) == [(0, 1, True), (1, 3, True)] and played.ends == [3, 0]


def test_a_message_begins_when_all_its_parties_are_ready() -> None:
    played = run_programs([[AT, Compute(1), *collective("a", (0, 1), 0.5), Compute(1)],
                           [AT, Compute(3), *collective("a", (0, 1), 0.5)]], [0, 1])
    assert intervals(played, 0) == [(0, 1, True), (1, 3.5, False), (3.5, 4.5, True)]
    assert intervals(played, 1) == [(0, 3, True), (3, 3.5, False)]
    assert (played.messages["a"].began, played.messages["a"].done, played.messages["a"].last) == (3, 3.5, 1)


def test_a_message_travels_beside_work() -> None:
    """Posted early, waited for late: what is on its way costs nothing."""
    taker = [AT, Isend("a", (0, 1), 2.0), Compute(3.0), Wait("a"), Compute(1.0)]
    played = run_programs([taker, [AT, Isend("a", (0, 1), 2.0), Compute(0.5)]], [0, 1])
    assert intervals(played, 0) == [(0, 3, True), (3, 4, True)] and played.messages["a"].done == 2


def test_a_sender_waits_for_its_receiver() -> None:
    played = run_programs([[AT, *collective("a", (0, 1)), Compute(1)], [AT, Compute(5), *collective("a", (0, 1))]], [0, 1])
    assert intervals(played, 0) == [(0, 5, False), (5, 6, True)]


def test_who_waits_for_each_other_is_found() -> None:
    with pytest.raises(Deadlock, match=r"classes \[0, 1\]"):
        run_programs([[AT, *collective("a", (0, 1)), *collective("b", (0, 1))], [AT, *collective("b", (0, 1)), *collective("a", (0, 1))]], [0, 0])


def test_posting_both_before_waiting_is_no_deadlock() -> None:
    played = run_programs([[AT, Isend("a", (0, 1)), *collective("b", (0, 1)), Wait("a")],
                   [AT, Isend("b", (0, 1)), *collective("a", (0, 1)), Wait("b")]], [0, 0])
    assert played.ends == [0, 0]


# ------------------------------------------------------------------------------------------- shared cores


def test_two_on_one_core_take_twice_as_long() -> None:
    played = run_programs([[AT, Compute(1.0)], [AT, Compute(1.0)]], [0, 0], Pool(1))
    assert played.ends == [2, 2]


def test_one_that_comes_later_slows_the_other_from_then_on() -> None:
    late = [AT, *collective("a", (1, 2)), Compute(1.0)]
    played = run_programs([[AT, Compute(2.0)], late, [AT, Compute(1.0), *collective("a", (1, 2))]], [0, 0, 1], Pool(1))
    # alone until 1, then shared: 1 second of work each, at half the speed
    assert played.ends[:2] == [3, 3]


def test_machines_are_apart() -> None:
    assert run_programs([[AT, Compute(1.0)], [AT, Compute(1.0)]], [0, 1], Pool(1)).ends == [1, 1]


def test_cores_that_slow_each_other_down() -> None:
    assert run_programs([[AT, Compute(1.0)], [AT, Compute(1.0)]], [0, 0], Pool(2, 0.5)).ends == [2, 2]
    assert run_programs([[AT, Compute(1.0)]] * 4, [0] * 4, Pool(2, 0.5)).ends == [4] * 4


def test_ranks_that_work_in_turn_share_a_core_without_loss() -> None:
    """The stages of a decoding pipeline: each is busy for its share only."""
    played = run_programs([[AT, Compute(2.0, 0.25)], [AT, Compute(2.0, 0.75)]], [0, 0], Pool(1))
    assert played.ends == [2, 2] and [p[0].busy for p in played.intervals] == [0.5, 1.5]


def test_a_message_keeps_cores_busy_as_far_as_it_says() -> None:
    programs = [[AT, Isend("a", (0,), 1.0, 1.0), Compute(1.0), Wait("a")]]
    assert run_programs(programs, [0], Pool(1)).ends == [2]
    assert run_programs([[AT, Isend("a", (0,), 1.0, 0.0), Compute(1.0), Wait("a")]], [0], Pool(1)).ends == [1]


@pytest.mark.parametrize("cores, load, rate", [
    (1, 1, 1), (1, 4, 0.25), (2, 1.5, 0.9), (2, 2, 0.8), (2, 4, 0.4), (4, 0, 1)])
def test_rates(cores: int, load: float, rate: float) -> None:
    assert Pool(cores, 0.8).rate(load) == pytest.approx(rate if cores > 1 else min(1, 1 / max(load, 1)))


# ------------------------------------------------------------------------------------------- conservation


@st.composite
def programs(draw: st.DrawFn) -> list[list[Op]]:
    """Classes that collective in one common order, so that they cannot block each other."""
    count = draw(st.integers(1, 4))
    ops: list[list[Op]] = [[EventBegin(0, 0, 0)] for _ in range(count)]
    seconds = st.integers(0, 8).map(lambda n: n / 4)
    late: list[tuple[int, str]] = []
    for n in range(draw(st.integers(0, 10))):
        for c in range(count):
            ops[c].append(Compute(draw(seconds), draw(st.sampled_from([1.0, 0.5]))))
        parties = tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))))
        time = draw(seconds)
        for c in parties:
            ops[c].append(Isend(f"k{n}", parties, time))
            if draw(st.booleans()):
                ops[c].append(Wait(f"k{n}"))
            else:
                late.append((c, f"k{n}"))
    for c, key in late:
        ops[c].append(Wait(key))
    return ops


@settings(max_examples=150, deadline=None)
@given(programs())
def test_work_is_conserved_and_the_critical_path_is_the_whole_time(ops: list[list[Op]]) -> None:
    played = run_programs(ops, [0] * len(ops))
    for c, own in enumerate(ops):
        wanted = sum(a.seconds * a.share for a in own if isinstance(a, Compute))
        assert sum(p.busy for p in played.intervals[c]) == pytest.approx(wanted)
        every = played.intervals[c]
        assert all(a.stop == b.start for a, b in zip(every, every[1:])) and (not every or every[0].start == 0)
        assert played.ends[c] >= sum(a.seconds for a in own if isinstance(a, Compute)) - 1e-9
    last = max(range(len(ops)), key=lambda c: played.ends[c])
    segments = find_critical_path(played, last, played.ends[last], 0.0)
    assert all(a.stop == b.start for a, b in zip(segments, segments[1:]))
    assert sum(h.stop - h.start for h in segments) == pytest.approx(played.ends[last])


@settings(max_examples=100, deadline=None)
@given(programs(), st.integers(1, 3))
def test_fewer_cores_are_never_faster(ops: list[list[Op]], cores: int) -> None:
    """Nothing is lost either: the cores do all the work there is."""
    free, crowded = (run_programs(ops, [0] * len(ops), pool) for pool in (None, Pool(cores)))
    assert all(a <= b + 1e-9 for a, b in zip(free.ends, crowded.ends))
    total = sum(a.seconds * a.share for own in ops for a in own if isinstance(a, Compute))
    assert max(crowded.ends) >= total / cores - 1e-9
    for c, own in enumerate(crowded.intervals):
        alone = sum(a.seconds for a in ops[c] if isinstance(a, Compute))
        assert sum(p.stop - p.start for p in own if p.key is None) >= alone - 1e-9
