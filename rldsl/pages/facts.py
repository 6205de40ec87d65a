"""What the tables of a page say. In: a plan and its timeline. Out: records of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rldsl.clusters import Cluster
from rldsl.pages.colors import WORK, Hue
from rldsl.pages.details import Sources
from rldsl.pages.memory import Panel
from rldsl.pages.recorded import Recorded
from rldsl.plan.events import Fetch, ModelCall
from rldsl.plan.model import Plan
from rldsl.plan.naming import PlaceTexts, quote
from rldsl.plan.notation import human, ranks_text, seconds_text
from rldsl.plan.projection import event_paths, times
from rldsl.simulate import Timeline
from rldsl.simulate.summary import critical_path_by_line

LEAST, MOST = 0.01, 8  # share of a step below which a line is not named; lines that are


@dataclass(frozen=True, slots=True)
class Tile:
    """One number of the head of the page."""

    name: str  # of the number
    value: str  # the number, with its unit
    note: str  # below it


def tiles(plan: Plan, cluster: Cluster, timeline: Timeline, panels: Sequence[Panel], limit: int) -> tuple[Tile, ...]:
    header, every = plan.header, list(event_paths(plan))
    per_node = max(1, min(header.world, header.devices_per_node))
    nodes, speed = -(-header.world // per_node), f"{timeline.tokens_per_second:,.0f} tokens/s on {cluster.name}"
    asked = sum(isinstance(e, ModelCall) for e, _ in every)
    inserted = sum(bool(e.because) for e, _ in every)
    moved = sum(e.bytes * times(path) for e, path in every if e.bytes > 0) / max(1, header.steps)
    ragged = sum(e.bytes < 0 for e, _ in every)
    peak = max((p.peak.bytes for p in panels), default=0)
    return (
        Tile("ranks", f"{header.world:,}", f"{nodes:,} node{'s' * (nodes > 1)} of {per_node}"),
        Tile("calls", str(asked), f"{inserted} inserted event{'s' * (inserted != 1)}"),
        Tile("predicted step", seconds_text(timeline.seconds), speed),
        Tile("peak memory", human(peak), f"of {human(limit)} per device" if limit else "per rank"),
        Tile("moved per step", human(round(moved)),
             f"and {ragged} transfer{'s' * (ragged != 1)} with sizes known only at run time"
             if ragged else "between ranks"),
        Tile("steps", f"{header.steps:,}", f"seed {header.seed}"),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A mesh in the legend."""

    hue: Hue  # the color of the mesh
    ranks: str  # of the mesh
    runs: str  # what runs there
    idle: str  # the share of a step in which it is idle; "": nothing is called there


def legend(plan: Plan, hues: Mapping[str, Hue], timeline: Timeline) -> tuple[Entry, ...]:
    idle, found = dict(timeline.idle), []
    sizes = {m.id: m for m in plan.meshes}
    for mesh, hue in hues.items():
        work = [e for e, _ in event_paths(plan) if e.mesh == mesh and e.traits.family in WORK]
        named = [e.display_name for e in work if isinstance(e, ModelCall)]
        if not named:
            named = [f"{e.data}.next" if isinstance(e, Fetch) else ", ".join(e.result_names) for e in work]
        found.append(Entry(hue, ranks_text(sizes[mesh].members()), ", ".join(dict.fromkeys(named)),
                           f"{idle[mesh]:.0%} idle" if mesh in idle else ""))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model in a table."""

    event: int  # id
    name: str  # "actor.generate"
    where: str  # its mesh and degrees
    seconds: str  # the longest that a rank spends in it, per step
    busy: str  # the share of it in which ranks compute
    recorded: str  # as `seconds`, from the trace; "": no trace


def calls(plan: Plan, timeline: Timeline, recorded: Recorded | None) -> tuple[Call, ...]:
    """The calls, each with the longest that a rank spends in it in a step."""
    places, longest = PlaceTexts.of(plan), timeline.event_seconds()
    seen = recorded.event_seconds() if recorded else {}
    found = []
    for event, _ in event_paths(plan):
        if isinstance(event, ModelCall):
            spans = [s for s in timeline.spans if s.event == event.id]
            length = sum(s.stop - s.start for s in spans)
            found.append(Call(event.id, event.display_name, places.where(event),
                              seconds_text(longest[event.id]) if event.id in longest else "",
                              f"{sum(s.busy for s in spans) / length:.0%}" if length else "",
                              seconds_text(seen[event.id]) if event.id in seen else ""))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Wait:
    """The part of the critical path that belongs to one line of the program."""

    what: str  # the event
    at: str  # "file:line"
    quote: str  # that line of the program
    seconds: str  # of the critical path
    share: float  # of the step


def waits(plan: Plan, timeline: Timeline, sources: Sources) -> tuple[Wait, ...]:
    """The critical path by lines, the longest first."""
    found = [Wait(p.what, p.line, quote(sources, p.line).strip(), seconds_text(p.seconds), p.seconds / timeline.seconds)
             for p in critical_path_by_line(plan, timeline) if p.seconds >= LEAST * timeline.seconds > 0]
    return tuple(sorted(found, key=lambda w: -w.share)[:MOST])


def held(panel: Panel) -> tuple[tuple[str, str], ...]:
    """The largest holders at the peak of a rank, and what remains."""
    most = panel.peak.holders[:6]
    rest = panel.peak.bytes - sum(n for _, n in most)
    return (*((what, human(n)) for what, n in most), *([("the rest", human(rest))] if rest > 0 else []))


@dataclass(frozen=True, slots=True)
class Row:
    """A model in a table."""

    name: str  # of the model
    kind: str  # its head
    path: str  # its directory
    dtype: str  # of its parameters
    life: str  # how its parameters change: "trained on ...", "frozen"


def models(plan: Plan) -> tuple[Row, ...]:
    places, found = PlaceTexts.of(plan), []
    for m in plan.models:
        life = "frozen"
        if m.train_layout:
            life = f"trained on {places.layouts[m.train_layout]}" + (f", lr {m.optimizer.lr:g}" if m.optimizer else "")
            life += f", adapters of rank {m.lora.r}" if m.lora else ""
        elif m.updated_from:
            life = f"updated from {', '.join(dict.fromkeys(m.updated_from))}"
        found.append(Row(m.name, m.head_name, m.path, m.dtype, life))
    return tuple(found)
