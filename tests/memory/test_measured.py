"""Estimates against what runs really hold, for a few cases of `plans.py`; `benchmarks/memory.py` runs them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl.memory import curves
from rldsl.memory.curve import each_rank, peak, points
from rldsl.plan.codec import encode
from rldsl.plan.events import Generate, Infer, Realloc, Save, Train
from rldsl.plan.projection import event_paths
from tests.memory.accounting import measured
from tests.memory.plans import CASES, Case, plan_of
from tests.samples import thorough_unless

GATE = 0.10
SMALL = ("gpt2", "top k", "whole vocabulary", "half, recompute", "adapters, half", "greedy, slots", "top_p",
         "save, checkpoint", "dpo pp=2", "continued, dp=2",
         "pp=4, dp=2 tp=2", "ppo, as ReaL", "tied", "zero=1", "zero=1, mbs, tied", "zero=2, half", "zero=2, recompute",
         "zero=2, pp=2", "zero=3, small head", "zero=3, tp=2")

SHOWN = {"gpt2", "save, checkpoint", "dpo pp=2", "continued, dp=2", "zero=1, mbs, tied", "zero=2, half"}


def small(case: Case) -> Case:
    """With fewer tokens to decode, which takes most of the time, and rows instead."""
    return replace(case, response=min(case.response, 12), prompt=min(case.prompt, 48))


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_unless(SHOWN.__contains__, SMALL))
def test_estimates_are_within_the_gate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every rank: the peak of the run, and what each call, save and reallocation holds while it runs."""
    monkeypatch.chdir(tmp_path)
    case = small(next(c for c in CASES if c.name == name))
    plan = plan_of(case, tmp_path)
    calls = {e.id: e for e, _ in event_paths(plan) if isinstance(e, Generate | Infer | Train | Realloc | Save)}
    found = measured(encode(plan), tmp_path / "out", case.world)
    for rank, curve in each_rank(curves(plan, "cpu")):
        assert peak(curve).bytes == pytest.approx(found[rank].peak, rel=GATE), f"rank {rank}"
        for point in points(curve):
            if point.event in calls:
                real = found[rank].events[point.event]
                said = (point.before, point.during, point.after)
                assert said == pytest.approx(real, rel=GATE), f"rank {rank}, {type(calls[point.event]).__name__}"


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 20 and len({c.name for c in CASES}) == len(CASES)
    assert {c.world for c in CASES} == {1, 2, 4} and set(SMALL) <= {c.name for c in CASES}
