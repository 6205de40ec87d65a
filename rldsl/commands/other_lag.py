"""What a lag gains or loses: the same program with another one, on the same cluster.

In: a program, and how it was compiled and simulated. Out: the seconds of its step and its memory with the other lag.
With a lag the other one is none; without, it is one step, if generation then has ranks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rldsl.diag import Failure
from rldsl.plan.model import Plan as Record
from rldsl.plan.projection import event_paths
from rldsl.python.plan import Plan
from rldsl.simulate.summary import OtherLag
from rldsl.syntax import ast


def other_lag(plan: Plan, compiled_as: Callable[[Callable[[ast.File], ast.File]], Plan],
              seconds: Callable[[Plan], float]) -> OtherLag | None:
    """compiled_as: compiles the program after a change of its text. seconds: of a simulated step."""
    lag = 0 if plan.record.header.lag else 1
    if lag and not _may_overlap(plan.record):
        return None
    try:
        other = compiled_as(lambda file: with_lag(file, lag))
        return OtherLag(lag, seconds(other), peak_bytes(other))
    except Failure:  # with a lag the program is wrong, or does not fit
        return None


def peak_bytes(plan: Plan) -> int:
    """Of the rank that needs most memory."""
    return max(peak.bytes for peak in plan.compiled.peaks.values())


def with_lag(file: ast.File, lag: int) -> ast.File:
    """The program with another lag."""
    return replace(file, items=tuple(_with_lag(item, lag) if isinstance(item, ast.Flow) else item
                                     for item in file.items))


def _with_lag(flow: ast.Flow, lag: int) -> ast.Flow:
    others = tuple(o for o in flow.options if o.name.name != "lag")
    at = flow.name.span
    given = ast.Option(span=at, name=ast.Ident(span=at, name="lag"), value=ast.Number(span=at, value=lag))
    return replace(flow, options=(*others, given))


def _may_overlap(plan: Record) -> bool:
    """Whether some ranks generate for training and other ranks work meanwhile."""
    meshes = {m.id: frozenset(m.members()) for m in plan.meshes}
    generating, working = set[int](), set[int]()
    for event, path in event_paths(plan):
        if event.traits.family == "call" and not any(getattr(block, "over", "") for block in path):
            (generating if event.new_rows else working).update(meshes[event.mesh])
    return bool(generating - working and working - generating)
