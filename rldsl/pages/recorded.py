"""A recorded timeline (`plan/trace.py`) as the rows of a picture, next to those of the simulation.

In: the text of a trace file, and the plan that was run. Out: `Recorded`. Errors: RL0098 this is no timeline, or it
belongs to another plan.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from rldsl.diag import Failure, fail
from rldsl.pages.rows import Bar, Chart, Row, chart
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths


class EventRun(NamedTuple):
    """One run of an event on a rank."""

    rank: int  # of the world
    event: int  # id
    start: float  # seconds
    stop: float  # seconds
    busy: float | None  # the share of it in which the rank computed; None: unknown


@dataclass(frozen=True, slots=True)
class Recorded:
    """The step of median duration of a trace, without its first step, which warms up."""

    step: int  # its number
    steps: int  # how many the trace has
    seconds: float  # from the first begin to the last end
    ran: tuple[EventRun, ...]  # by all ranks
    what: str  # "recorded" or "simulated"

    def event_seconds(self) -> dict[int, float]:
        """Event -> the longest that a rank spent in it, all iterations together."""
        by: dict[tuple[int, int], float] = {}
        for r in self.ran:
            by[r.event, r.rank] = by.get((r.event, r.rank), 0.0) + r.stop - r.start
        found: dict[int, float] = {}
        for (event, _), seconds in by.items():
            found[event] = max(found.get(event, 0.0), seconds)
        return found


def read(text: str, file: str, plan: Plan) -> Recorded:
    """The middle step of a trace."""
    try:
        data = json.loads(text)
        about, every = data["otherData"], [x for x in data["traceEvents"] if x["ph"] == "X"]
        steps = _steps(every)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _wrong_trace(file, "not a trace file", f"{type(error).__name__}: {error}") from None
    header, known = plan.header, {e.id: e for e, _ in event_paths(plan)}
    for key, value in (("program", header.program), ("flow", header.flow), ("world", header.world)):
        if not isinstance(about, dict) or about.get(key) != value:
            found = about.get(key) if isinstance(about, dict) else None
            raise _wrong_trace(file, "this trace belongs to another plan",
                      f"{key}: {found!r} in the trace, {value!r} in the plan")
    for x in every:
        event = known.get(x["args"]["event"])
        if event is None or x.get("cat") != event.kind or x["args"].get("at") != event.at:
            raise _wrong_trace(file, "this trace belongs to another plan",
                      f"event {x['args']['event']} is {x.get('cat')!r} of {x['args'].get('at')!r} in the trace")
    if not steps:
        raise _wrong_trace(file, "this trace contains no step", "it ends before the end of the first step")
    later = {n: ran for n, ran in steps.items() if n > min(steps)} or steps
    lengths = sorted((max(r.stop for r in ran) - min(r.start for r in ran), n) for n, ran in later.items())
    seconds, step = lengths[len(lengths) // 2]
    return Recorded(step, len(steps), seconds, tuple(steps[step]), str(about.get("what", "recorded")))


def _wrong_trace(file: str, title: str, note: str) -> Failure:
    return fail("RL0098", title, place=file, notes=(note,),
                help="--trace takes a file written by `rlc run --trace FILE` for this plan")


def _steps(every: list[Any]) -> dict[int, list[EventRun]]:
    """Step -> what ran in it. Step 0 is what comes before the first."""
    found: dict[int, list[EventRun]] = {}
    for x in every:
        start, length, args = x["ts"], x["dur"], x["args"]
        rank, event, step, busy = x["tid"], args["event"], args["step"], args.get("busy")
        if not all(type(n) is int for n in (rank, event, step)):
            raise ValueError(f"a span of rank {rank!r}, event {event!r}, step {step!r}")
        finite = all(isinstance(n, int | float) and math.isfinite(n) and abs(n) < 1e18 for n in (start, length))
        if not finite or length < 0:
            raise ValueError(f"a span at {start!r} of length {length!r}")
        share = min(busy / (length / 1e6), 1.0) if isinstance(busy, int | float) and busy >= 0 and length else None
        if step > 0:
            found.setdefault(step, []).append(EventRun(rank, event, start / 1e6, (start + length) / 1e6, share))
    return found


def on_simulated_rows(recorded: Recorded, simulated: Chart) -> Chart:
    """The same rows as those of the simulation, each with what its first rank did."""
    begin = min(r.start for r in recorded.ran)
    bars: dict[int, list[Bar]] = {}
    for r in recorded.ran:
        bars.setdefault(r.rank, []).append(Bar(r.event, r.start - begin, r.stop - begin, r.busy))
    rows = [Row(row.ranks, row.first, tuple(bars.get(row.first, ()))) for row in simulated.rows]
    return chart(rows, 0.0, max(recorded.seconds, 1e-9))
