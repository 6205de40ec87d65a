"""A recorded timeline next to the simulated one, and everything that is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.pages.recorded import Recorded, on_simulated_rows, read
from rldsl.pages.rows import simulated
from rldsl.simulate import simulate
from tests.plan.sample import grpo
from tests.plan_views.plans import renumbered
from tests.report.pages import H100, made, trace


def load(found: Any) -> Recorded:
    return read(json.dumps(found), "run.json", grpo())


def refused(found: Any) -> Failure:
    with pytest.raises(Failure) as failure:
        read(found if isinstance(found, str) else json.dumps(found), "run.json", grpo())
    assert [d.code for d in failure.value.diagnostics] == ["RL0098"]
    assert failure.value.diagnostics[0].place == "run.json"
    return failure.value


@pytest.mark.parametrize("steps, chosen", [(1, 1), (2, 2), (3, 3), (4, 3), (6, 4)])
def test_the_step_of_median_length_of_those_after_the_first(steps: int, chosen: int) -> None:
    found = load(trace(grpo(), steps))
    assert (found.step, found.steps) == (chosen, steps)
    assert found.event_seconds()[5] == pytest.approx(chosen / 1e3)
    assert {r.rank for r in found.ran} == {0, 1, 2, 3}
    assert all(r.busy == pytest.approx(0.5) for r in found.ran)


def test_rows_are_those_of_the_simulation() -> None:
    rows = simulated(simulate(grpo(), H100))
    chart = on_simulated_rows(load(trace(grpo())), rows)
    assert [(r.ranks, r.first) for r in chart.rows] == [(r.ranks, r.first) for r in rows.rows]
    assert chart.start == 0 and min(b.start for r in chart.rows for b in r.bars) == 0
    assert max(b.stop for r in chart.rows for b in r.bars) == pytest.approx(chart.stop)


def test_the_page_has_both() -> None:
    found = made(recorded=load(trace(grpo())))
    assert len(found.all("svg", class_="bars")) == 2
    assert "The second chart shows step 3 of a recorded run" in found.text and "Recorded: step 3 of 3" in found.text
    assert len(made().all("svg", class_="bars")) == 1 and "The second chart shows step" not in made().text


def test_a_simulated_timeline_is_called_so() -> None:
    assert "of a simulated run" in made(recorded=load(trace(grpo(), what="simulated"))).text


def test_a_rank_that_the_trace_lacks_has_an_empty_row() -> None:
    found = trace(grpo())
    found["traceEvents"] = [x for x in found["traceEvents"] if x.get("tid") != 0]
    chart = on_simulated_rows(load(found), simulated(simulate(grpo(), H100)))
    assert [bool(r.bars) for r in chart.rows][0] is False and any(r.bars for r in chart.rows)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "{}", '{"traceEvents": []}', '{"otherData": {}}',
                                  '{"traceEvents": 3, "otherData": {}}', '{"traceEvents": [3], "otherData": {}}',
                                  '{"traceEvents": [{}], "otherData": {}}', "[" * 100_000])
def test_what_is_no_timeline(text: str) -> None:
    assert "not a trace file" in str(refused(text))


@pytest.mark.parametrize("key, value", [("program", "other.rlf"), ("flow", "dpo"), ("world", 8), ("world", "4"),
                                        ("flow", None)])
def test_of_another_program(key: str, value: Any) -> None:
    failure = refused(trace(grpo(), **{key: value}))
    assert "another plan" in str(failure) and key in failure.diagnostics[0].notes[0]


@pytest.mark.parametrize("about", [None, 3, [], "x"])
def test_without_a_word_about_itself(about: Any) -> None:
    refused(trace(grpo()) | {"otherData": about})


def test_of_the_same_program_compiled_again() -> None:
    refused(trace(renumbered(grpo(), 1)))


@pytest.mark.parametrize("change", [
    {"ts": None}, {"ts": "0"}, {"ts": float("nan")}, {"ts": float("inf")}, {"ts": 1e30}, {"dur": -1.0}, {"dur": None},
    {"tid": "0"}, {"tid": 1.5}, {"tid": True}, {"cat": "train"}, {"cat": None}, {"args": None}, {"args": {}},
    {"args": {"event": 5}}, {"args": {"event": 999, "step": 1, "at": ""}}, {"args": {"event": [], "step": 1, "at": ""}},
    {"args": {"event": 3, "step": "1", "at": "grpo.rlf:8"}}, {"args": {"event": 3, "step": 1, "at": "grpo.rlf:9"}}])
def test_a_broken_span(change: dict[str, Any]) -> None:
    found = trace(grpo())
    first = next(i for i, x in enumerate(found["traceEvents"]) if x["ph"] == "X" and x["cat"] == "fetch")
    found["traceEvents"][first] |= change
    refused(found)


def test_without_a_step() -> None:
    found = trace(grpo(), 1)
    for x in found["traceEvents"]:
        if x["ph"] == "X":
            x["args"]["step"] = 0
    assert "no step" in str(refused(found))


def test_busy_that_is_no_number_is_left_out() -> None:
    found = trace(grpo(), 1)
    for x in found["traceEvents"]:
        if x["ph"] == "X":
            x["args"]["busy"] = "much"
    assert {r.busy for r in load(found).ran} == {None}
