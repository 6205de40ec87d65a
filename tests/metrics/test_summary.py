"""What a summary says of a run that did not make all its steps, or not in one start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.plan.events import When, Loop, Realloc
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.runtime.metrics.summary import summarize
from tests.plan import sample


def plan(steps: int, period: int, inner: int) -> Plan:
    """Its reallocs: in every step, and `inner` times in every `period`-th step."""
    grpo = sample.grpo()
    [move] = [event for event, _ in event_paths(grpo) if isinstance(event, Realloc)]
    often = When(period, (Loop("more", inner, (move,)),))
    return replace(grpo, header=replace(grpo.header, steps=steps), body=(Loop("steps", steps, (move, often)),))


@pytest.mark.parametrize("done, made, counts", [
    (12, 12, [12, 8]),
    (12, 6, [6, 4]),  # resumed after step 6
    (4, 4, [4, 2]),  # stopped
    (9, 2, [2, 2]),  # resumed after step 7, stopped after step 9
    (8, 2, [2, 0]),
    (5, 0, [0, 0]),
])
def test_reallocs_are_those_of_the_steps_that_were_made(done: int, made: int, counts: list[int]) -> None:
    summary = summarize(plan(12, 3, 2), Path("out"), done, made, 1.0)
    assert [move["times"] for move in summary["reallocs"]] == counts
    assert (summary["steps"], summary["made"]) == (done, made)


def test_a_realloc_before_the_steps_happens_in_every_start() -> None:
    whole = plan(12, 3, 2)
    [loop] = whole.body
    assert isinstance(loop, Loop)
    summary = summarize(replace(whole, body=loop.body[:1]), Path("out"), 8, 2, 1.0)
    assert [move["times"] for move in summary["reallocs"]] == [1]
