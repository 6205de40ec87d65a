"""The page of a plan: one HTML file that needs nothing else.

In: `Given`, and of a run `RunGiven`. Out: the text. templates/report.html.j2 says what is where, templates/run.html.j2
what comes first on the page of a run; the page may load nothing, and run only the scripts of templates/, whose hash is
in its policy.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from rldsl.clusters import Cluster
from rldsl.memory.curve import Curve
from rldsl.pages import gantt, memory
from rldsl.pages.colors import hues, model_styles
from rldsl.pages.dataflow import dataflow
from rldsl.pages.details import Sources, details
from rldsl.pages.facts import calls, held, legend, models, tiles, waits
from rldsl.pages.graph import graph
from rldsl.pages.histograms import distributions
from rldsl.pages.recorded import Recorded, on_simulated_rows
from rldsl.pages.rows import Chart, several, simulated
from rldsl.pages.run import RunGiven, averaged, config, curves, metrics, samples, shown_counts
from rldsl.pages.run import tiles as run_tiles
from rldsl.pages.templates import template
from rldsl.pages.texts import ranges_text
from rldsl.plan.events import Event
from rldsl.plan.model import Plan
from rldsl.plan.notation import cut, human, seconds_text
from rldsl.plan.projection import event_paths
from rldsl.plan.visible_plan import visible_plan
from rldsl.simulate import Lengths, Timeline
from rldsl.simulate.lengths import token_frames
from rldsl.simulate.summary import which_steps
from rldsl.verify import Proof

MANY = 40  # rows of a chart; of more, the first
STEPS_SHOWN = 3  # with a lag
STRIPS = 6  # of memory below a chart


@dataclass(frozen=True, slots=True)
class Given:
    """What a report is made from."""

    plan: Plan  # the plan
    id: str  # of the plan
    proof: Proof  # that it can run
    curves: tuple[Curve, ...]  # what its ranks hold at each event
    cluster: Cluster  # what a step is simulated on
    assumed: bool  # whether the cluster is a default
    timeline: Timeline  # the simulated step
    lengths: Lengths = Lengths()  # that it was simulated with
    recorded: Recorded | None = None  # a trace of a run; None: none
    sources: Sources = field(default_factory=dict)  # path -> text of sources that are still what was compiled


@dataclass(frozen=True, slots=True)
class Figure:
    """A timeline."""

    name: str  # unique; part of ids in the page
    title: str  # above it
    svg: Markup  # the picture
    rows: tuple[str, ...]  # the ranks next to its rows
    strips: tuple[str, ...]  # the ranks next to the memory below the rows
    hidden: int  # events that are too short to see
    more: int  # rows left out


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of some ranks over a step."""

    title: str  # the ranks
    svg: Markup  # the picture
    size: str  # at the peak
    event: int  # the event at the peak; -1: none
    name: str  # of that event
    share: float  # of the device's memory; 0: unknown
    holders: tuple[tuple[str, str], ...]  # (what, bytes) at the peak, the largest first


def page(given: Given, run: RunGiven | None = None) -> str:
    """run: one of this plan; its page has all that the plan's page has."""
    given = replace(given, plan=visible_plan(given.plan))
    plan, sources = given.plan, given.sources
    colors, every, flow = hues(plan), details(plan, sources), dataflow(plan)
    styles, durations = model_styles(plan), given.timeline.event_seconds()
    titles = {n.event: n.title for n in flow.nodes if n.what in ("call", "value")}
    known = {e.id: e for e, _ in event_paths(plan)}
    script = template("report.js") + (template("run.js") if run else "")
    steps = simulated(given.timeline)
    panels = memory.panels(given.curves)
    limit = plan.header.memory or round(given.cluster.memory_gb * 1e9)
    top = memory.scale(panels, limit)
    environment = Environment(loader=FunctionLoader(template), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"human": human, "cut": cut, "seconds": seconds_text}
    style = template("graph.css") + template("report.css") + (template("run.css") if run else "")
    return environment.get_template("report.html.j2").render(
        given=given, plan=plan, header=plan.header, style=Markup(style), **_run(run),
        script=Markup(script), script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        tiles=run_tiles(run, given.timeline.seconds, given.cluster.name) if run else
        tiles(plan, given.cluster, given.timeline, panels, limit), graph=graph(plan, flow),
        legend=legend(plan, colors, given.timeline), model_styles=styles,
        figures=_figures(given, steps, {id: gantt.drawn(e, styles, titles) for id, e in known.items()}, panels, top),
        calls=calls(plan, given.timeline, given.recorded), waits=waits(plan, given.timeline, sources),
        lengths=_lengths(given), bounds=given.lengths == Lengths(),
        panels=[_panel(p, known, durations, top, limit) for p in panels[:memory.MOST]],
        more=len(panels) - memory.MOST, kinds=memory.KINDS, limit=limit, far=top < limit,
        events=every, inserted=[d for d in every if d.because and d.kind != "free"],
        frees=[d for d in every if d.kind == "free"], models=models(plan), sources=sources,
        shown=[path for path in sources if not path.startswith("std/")])


def _run(run: RunGiven | None) -> dict[str, Any]:
    """What templates/run.html.j2 needs."""
    if run is None:
        return {"run": None}
    found = samples(run)
    return {"run": run, "metrics": metrics(run), "curves": Markup(curves(run)), "samples": found,
            "counts": shown_counts(found, run),
            "distributions": distributions(run.histograms), "config": config(run), "averaged": averaged(run),
            "value_names": list(dict.fromkeys(name for s in found for name, _ in s.order))}


def _lengths(given: Given) -> str:
    """The tokens of a prompt and of a response that the simulation expects; "" where nothing is generated."""
    rows = (given.lengths.of(f) for f, _ in token_frames(given.plan))
    return " or ".join(dict.fromkeys(f"{r.prompt:g} + {r.response:g}" for r in rows))


def _figures(given: Given, steps: Chart, known: Mapping[int, gantt.Drawn], panels: Sequence[memory.Panel], top: int
             ) -> list[Figure]:
    """The simulated step, and the recorded one, each with the memory of its ranks. top: bytes at the upper end."""
    spans = given.timeline.spans
    class_of = {a: c for c, ranges in enumerate(given.timeline.classes) for a, b in ranges for a in range(a, b)}
    seldom = " or ".join(dict.fromkeys(map(which_steps, given.timeline.periodic)))
    left_out = f", without what runs {seldom}" if seldom else ""
    charts = [("simulated", f"Simulated on {given.cluster.name}{left_out}", steps)]
    strips = {"simulated": _strips(panels, top, lambda rank: [
        (s.event, s.start, s.stop) for s in spans if s.rank_class == class_of.get(rank)])}
    if given.plan.header.lag:
        ahead = {e.id: e.ahead for e, path in event_paths(given.plan) if path and e.ahead >= 0}
        charts.append(("steps", f"{STEPS_SHOWN} steps in a row: the number in a bar is the step that it belongs to"
                       f"{left_out}",
                       several(steps, given.timeline.seconds, STEPS_SHOWN, ahead)))
    if given.recorded is not None:
        r = given.recorded
        charts.append(("recorded", f"{r.what.capitalize()}: step {r.step} of {r.steps}", on_simulated_rows(r, steps)))
        begin = min(x.start for x in r.ran)
        strips["recorded"] = _strips(panels, top, lambda rank: [
            (x.event, x.start - begin, x.stop - begin) for x in r.ran if x.rank == rank])
    found = []
    for name, title, chart in charts:
        shown = Chart(chart.rows[:MANY], chart.start, chart.stop, chart.hidden)
        ranks = tuple(ranges_text(r.ranks, 2) for r in shown.rows)
        below = strips.get(name, ())
        found.append(Figure(name, title, gantt.gantt(shown, known, title, below), ranks, tuple(s.ranks for s in below),
                            chart.hidden, len(chart.rows) - len(shown.rows)))
    return found


def _strips(panels: Sequence[memory.Panel], top: int, ran: Callable[[int], list[tuple[int, float, float]]]
            ) -> tuple[gantt.Strip, ...]:
    """ran: (event, start, stop) of a rank."""
    return tuple(gantt.Strip(ranges_text(p.ranks, 2), memory.over_time(p.curve, ran(p.ranks[0][0])), top,
                             f"Planned memory of ranks {ranges_text(p.ranks)}: at most {human(p.peak.bytes)}; the "
                             f"height is {human(top)}") for p in panels[:STRIPS])


def _panel(panel: memory.Panel, known: Mapping[int, Event], durations: Mapping[int, float], top: int,
           limit: int) -> Memory:
    alone = panel.ranks[0][1] - panel.ranks[0][0] == 1 and len(panel.ranks) == 1
    title = f"{'Rank' if alone else 'Ranks'} {ranges_text(panel.ranks)}"
    event = known.get(panel.peak.event)
    picture = memory.draw(panel, known, durations, top, limit, f"Memory of {title.lower()}")
    return Memory(title, picture, human(panel.peak.bytes), panel.peak.event, event.display_name if event else "",
                  min(panel.peak.bytes / limit, 1.0) if limit else 0.0, held(panel))
