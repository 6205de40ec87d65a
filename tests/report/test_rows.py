"""Rows of a timeline and panels of memory: what looks the same is one, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rldsl.memory import curves
from rldsl.memory.curve import Curve, Holding, peak
from rldsl.pages.gantt import Strip, gantt, tick
from rldsl.pages.markup import element, number, percent
from rldsl.pages.memory import category, over_time, panels, scale
from rldsl.pages.rows import SEEN, Chart, several, simulated
from rldsl.pages.texts import ranges_text
from rldsl.plan.notation import cut, seconds_text
from rldsl.simulate import PathSegment, Span, Timeline, simulate
from tests.plan.sample import grpo
from tests.report.pages import h100, wide


def timeline(*spans: Span, classes: int = 2, critical: tuple[PathSegment, ...] = ()) -> Timeline:
    return Timeline(10.0, tuple(((c, c + 1),) for c in range(classes)), spans, (), critical, 1)


def test_classes_that_do_the_same_share_a_row() -> None:
    chart = simulated(timeline(Span(0, 5, 0, 9, 9), Span(1, 5, 0.001, 9, 9)))
    assert [r.ranks for r in chart.rows] == [((0, 2),)]


@pytest.mark.parametrize("other", [Span(1, 6, 0, 9, 9), Span(1, 5, 1, 9, 9), Span(1, 5, 0, 8, 9), Span(1, 5, 0, 9, 3),
                                   Span(1, 5, 0, 9, 9, iteration=1)])
def test_classes_that_differ_do_not(other: Span) -> None:
    assert len(simulated(timeline(Span(0, 5, 0, 9, 9), other)).rows) == 2


def test_a_rank_with_one_event_more_has_a_row_of_its_own() -> None:
    assert len(simulated(timeline(Span(0, 5, 0, 9, 9), Span(1, 5, 0, 9, 9), Span(1, 6, 9, 9, 0))).rows) == 2


def test_what_is_too_short_is_counted() -> None:
    chart = simulated(timeline(Span(0, 5, 0, 9, 9), Span(0, 6, 9, 9 + 10 * SEEN / 2, 0), classes=1))
    assert (len(chart.rows[0].bars), chart.hidden) == (1, 1)


def test_several_steps_follow_one_another() -> None:
    """An event that runs ahead is of a later step than its neighbors; a copy of parameters of none."""
    one = simulated(timeline(Span(0, 5, 0, 9, 9), Span(1, 6, -1, 8, 9), Span(1, 7, 8, 9, 1),
                             critical=(PathSegment(0, 5, 0, 9, "work"),)))
    shown = several(one, 10.0, 3, {5: 0, 6: 1})
    first, second = ([(b.event, b.start, b.step) for b in row.bars] for row in shown.rows)
    assert first == [(5, 0, 1), (5, 10, 2), (5, 20, 3)] and shown.rows[0].critical == ((0, 9), (10, 19), (20, 29))
    assert second == [(6, -1, 2), (7, 8, 0), (6, 9, 3), (7, 18, 0), (6, 19, 4), (7, 28, 0)]
    assert (shown.start, shown.stop) == (one.start, one.stop + 20)


def test_the_picture_begins_with_the_first_and_ends_with_the_last() -> None:
    chart = simulated(timeline(Span(0, 5, -3, 12, 9), classes=1))
    assert (chart.start, chart.stop, chart.length) == (-3, 12, 15)
    assert simulated(timeline(classes=1)).length == 10


def test_an_empty_timeline_has_a_length() -> None:
    assert simulated(replace(timeline(classes=1), seconds=0.0)).length > 0


def test_hops_after_each_other_are_one_line() -> None:
    hops = (PathSegment(0, 5, 0, 2, "work"), PathSegment(0, 6, 2, 4, "work"), PathSegment(1, 6, 4, 5, "work"), PathSegment(0, 7, 6, 7, "message"))
    chart = simulated(timeline(Span(0, 5, 0, 9, 9), Span(1, 5, 0, 2, 2), critical=hops))
    assert [r.critical for r in chart.rows] == [((0, 4), (6, 7)), ((4, 5),)]


def test_ten_thousand_ranks_are_few_rows() -> None:
    plan = wide(2560)
    chart = simulated(simulate(plan, h100(10240)))
    assert len(chart.rows) <= 8
    assert sorted(r for row in chart.rows for a, b in row.ranks for r in range(a, b)) == list(range(10240))


# ----------------------------------------------------------------------------------------------------------- memory


def curve(*holdings: Holding, rank: int = 0, events: tuple[int, ...] = (1, 2)) -> Curve:
    return Curve(((rank, rank + 1),), events, holdings)


def test_every_rank_is_in_one_panel_and_peaks_are_the_largest() -> None:
    found = curves(grpo())
    made = panels(found)
    assert sorted(r for p in made for a, b in p.ranks for r in range(a, b)) == [0, 1, 2, 3]
    assert max(p.peak.bytes for p in made) == max(peak(c).bytes for c in found)


def test_curves_alike_share_a_panel() -> None:
    one, other = curve(Holding("a", 1000, 0, 3)), curve(Holding("b", 1001, 0, 3), rank=1)
    assert [p.ranks for p in panels([one, other])] == [((0, 2),)]


@pytest.mark.parametrize("holding", [Holding("a", 1100, 0, 3), Holding("a", 1000, 0, 1), Holding("a", 1000, 2, 3),
                                     Holding("a", 1000, 0, 3, host=True)])
def test_other_curves_do_not(holding: Holding) -> None:
    assert len(panels([curve(Holding("a", 1000, 0, 3)), curve(holding, rank=1)])) == 2


def test_memory_over_time_follows_the_events() -> None:
    """Event 1 holds 10 while it runs and leaves 4; event 2 holds 7."""
    found = curve(Holding("a", 4, 0, 4), Holding("b", 6, 1, 1), Holding("c", 3, 3, 3))
    assert over_time(found, [(2, 5.0, 6.0), (1, 1.0, 3.0)]) == ((1.0, 10), (3.0, 4), (5.0, 7), (6.0, 4))
    assert over_time(found, [(1, 1.0, 5.5), (2, 5.0, 6.0)]) == ((1.0, 10), (5.0, 7), (6.0, 4))  # they overlap
    assert over_time(found, [(1, 1.0, 3.0), (1, 3.0, 5.0)]) == ((1.0, 10), (3.0, 4), (3.0, 10), (5.0, 4))


def test_memory_of_ranks_that_ran_nothing_known_is_empty() -> None:
    assert over_time(curve(), []) == () and over_time(curve(), [(9, 0.0, 1.0)]) == ()


def test_memory_lies_below_the_rows_on_the_same_axis() -> None:
    chart = Chart((), 0.0, 10.0)
    found = str(gantt(chart, {}, "t", [Strip("0", ((5.0, 10), (7.5, 5)), 10, "about")]))
    assert "M5000 36L5000 0L7500 0L7500 18L10000 18V36Z" in found
    assert "M0 0" in str(gantt(chart, {}, "t", [Strip("0", (), 10, "about")]))
    assert "NaN" not in str(gantt(chart, {}, "t", [Strip("0", ((20.0, 5), (30.0, 0)), 0, "about")]))


@pytest.mark.parametrize("what, kind", [
    ("parameters of actor (dp=2)", "parameters"), ("parameters gathered to save actor", "parameters"),
    ("optimizer state of actor", "optimizer state"), ("optimizer step of actor.train", "optimizer state"),
    ("gradients of actor", "gradients"), ("activations of actor.train", "activations"),
    ("KV cache of actor.generate", "KV cache"), ("gen.tokens", "values and transfers"),
    ("realloc of actor", "values and transfers"), ("", "values and transfers")])
def test_kinds_of_what_is_held(what: str, kind: str) -> None:
    assert category(what) == kind


@pytest.mark.parametrize("limit, top", [(0, 1000), (1000, 1000), (1999, 1999), (2001, 1000), (500, 1000)])
def test_the_limit_is_in_the_picture_where_it_is_near(limit: int, top: int) -> None:
    assert scale(panels([curve(Holding("a", 1000, 0, 3))]), limit) == top
    assert scale([], 0) == 0


# ------------------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (12.34, "12.3 s"), (1234.5, "1,234 s"), (0.99949, "999 ms"), (0.9999, "1.00 s"), (0.0123, "12.3 ms"),
    (-0.5, "-500 ms"), (2.5e-6, "2.50 µs")])
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize("ranges, text", [
    (((0, 1),), "0"), (((0, 8),), "0–7"), (((0, 1), (4, 6)), "0, 4–5"),
    (((0, 1), (2, 3), (4, 5), (6, 7)), "0, 2, 4, … (4 ranks)")])
def test_ranges(ranges: tuple[tuple[int, int], ...], text: str) -> None:
    assert ranges_text(ranges) == text


@pytest.mark.parametrize("value, text", [(3.0, "3"), (0.126, "0.13"), (100.0, "100"), (-0.001, "0"), (-1.5, "-1.5")])
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_elements() -> None:
    assert percent(1 / 3) == "33.333%" and cut("abcdef", 4) == "abc…" and cut("abcd", 4) == "abcd"
    assert element("a", "<", element("b"), class_='"', data_x=1.0, y=None) == '<a class="&#34;" data-x="1">&lt;<b/></a>'
    assert element("svg", view_box="0 0 1 1") == '<svg viewBox="0 0 1 1"/>'


@pytest.mark.parametrize("length, step", [(20.9, 5.0), (8.0, 1.0), (0.042, 0.01), (561.0, 100.0), (1e-9, 2e-10)])
def test_ticks_are_round(length: float, step: float) -> None:
    assert tick(length) == pytest.approx(step)
