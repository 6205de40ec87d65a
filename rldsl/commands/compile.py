"""`rlc compile`: a program -> its plan in a file and what it will do, or one stage of compilation, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rldsl import api
from rldsl.commands import Usage
from rldsl.files import keep_inputs, write
from rldsl.plan.expr import Scalar

if TYPE_CHECKING:
    from rldsl.python.plan import Plan

Stage = Literal["graph", "events", "plan"]


def stage(emit: Stage, file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str]) -> str:
    """One stage of compilation as text; nothing is written."""
    if emit == "graph":
        from rldsl.graph.picture import text

        rules = api.read_source(place) if place else None
        return text(api.build_graph(api.read_source(file), sets, rules, overrides))
    from rldsl.python.entry import placing

    mode, rules = placing(place)
    events = api.draft_source(api.read_source(file), sets, rules, overrides, mode)
    if emit == "events":
        from rldsl.passes.listing import show

        return show(events)
    from rldsl.inspect.show import show as show_plan

    return show_plan(api.finish(events).plan)


def pass_names() -> tuple[str, ...]:
    """What `--print-after` takes, for the shell's completion."""
    from rldsl.passes.pipeline import NAMES

    return NAMES


def after(name: str, file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str]) -> str:
    """The events as they are after a pass, as text; "list": the passes. Errors: `Usage` for an unknown name."""
    from rldsl.passes import pipeline
    from rldsl.passes.listing import show
    from rldsl.python.entry import placing

    if name == "list":
        return "".join(f"{p.name:<10}  {p.about}\n" for p in pipeline.PASSES)
    if name not in pipeline.NAMES:
        near = get_close_matches(name, pipeline.NAMES, n=1)
        raise Usage(f"unknown pass {name!r}" + (f"; did you mean {near[0]}?" if near else ";")
                    + f" passes: {', '.join(pipeline.NAMES)}")
    mode, rules = placing(place)
    return show(pipeline.after(api.placed_source(api.read_source(file), sets, rules, overrides, mode), name))


def compile(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str],
            target: str | None, jobs: int = 1) -> tuple[str, Plan]:
    """Write the plan to `target` or next to the program; returns where, and the plan. jobs: processes of a search."""
    from rldsl.python import entry

    source = api.read_source(file)
    path = target or str(Path(file).with_suffix(".plan"))
    keep_inputs(path, (file, place))
    mode, rules = entry.placing(Path(place) if place else None)
    plan = entry.compile_source(source, sets, rules, overrides, mode, num_processes=jobs)
    write(path, bytes(plan))
    return path, plan


def predicted(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str], plan: Plan,
              cluster: str) -> tuple[str, dict[str, Any]]:
    """How long a step takes on a cluster, and what the lag, or one of a step, gains or loses: as a line of the preview,
    and as part of `rlc compile --json`."""
    from rldsl.commands.inputs import compiled_program
    from rldsl.commands.other_lag import other_lag, peak_bytes
    from rldsl.plan.notation import human, seconds_text
    from rldsl.simulate.summary import lag_verdict

    found = plan.simulate(cluster)
    other = other_lag(plan, lambda change: compiled_program(file, sets, place, overrides, change),
                      lambda p: p.simulate(cluster).average)
    line = f"  step        {seconds_text(found.seconds)} on {found.cluster.name}"
    if found.timeline.average_differs:
        line += f", {seconds_text(found.average)} on average"
    if other is not None:
        lag, peak = plan.record.header.lag, peak_bytes(plan)
        with_lag, without = (peak, other.peak_bytes) if lag else (other.peak_bytes, peak)
        line += (f"; lag {lag}: {lag_verdict(lag, found.average, other)}; peak memory {human(with_lag)} with a lag, "
                 f"{human(without)} without")
    return line + "\n", {"step_seconds": found.seconds, "average_seconds": found.average,
                         "lag": plan.record.header.lag,
                         "other_lag": asdict(other) if other is not None else None}


def summary(path: str, plan: Plan) -> dict[str, Any]:
    """What `rlc compile --json` prints of a plan."""
    compiled = plan.compiled
    peaks = compiled.peaks
    return {"plan": path, "id": plan.id, "ranks": plan.ranks, "params": plan.params, "events": compiled.proof.events,
            "entries": compiled.proof.entries, "checks": compiled.proof.checks,
            "peak_bytes": max(p.bytes for p in peaks.values())}
