"""What a lag gains or loses: the same program with another one, on the same cluster.

In: a program, and how it was compiled and simulated. Out: the seconds of its step and its memory with the other lag.
With a lag the other one is none; without, it is one step, if generation then has its own ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from rldsl.diag import Failure
from rldsl.graph.lag import with_lag
from rldsl.python.plan import Plan
from rldsl.simulate.summary import OtherLag, may_overlap
from rldsl.syntax import ast


def other_lag(plan: Plan, compiled_as: Callable[[Callable[[ast.File], ast.File]], Plan],
              seconds: Callable[[Plan], float]) -> OtherLag | None:
    """compiled_as: compiles the program after a change of its text. seconds: of a simulated step, on average."""
    lag = 0 if plan.record.header.lag else 1
    if lag and not may_overlap(plan.record):
        return None
    try:
        other = compiled_as(lambda file: with_lag(file, lag))
        return OtherLag(lag, seconds(other), peak_bytes(other))
    except Failure:  # with a lag the program is wrong, or does not fit
        return None


def peak_bytes(plan: Plan) -> int:
    """Of the rank that needs most memory."""
    return max(peak.bytes for peak in plan.compiled.peaks.values())
