"""A simulated step as text for a person and as JSON for a program.

In: a plan and its timeline. Out: text. The critical path is given by lines of the program: what to make faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rldsl.clusters import Cluster
from rldsl.diag import counted
from rldsl.plan.events import Event, Free, Loop, ModelCall
from rldsl.plan.events import Lengths as Counted
from rldsl.plan.json_output import json_output
from rldsl.plan.model import Plan
from rldsl.plan.naming import PlaceTexts, describe_event, line_of
from rldsl.plan.notation import cut, human, ranges_text, seconds_text
from rldsl.plan.projection import event_paths
from rldsl.plan.visible_plan import visible_plan
from rldsl.simulate.lengths import Lengths, token_frames
from rldsl.simulate.model import PeriodicEvents, Timeline

MIN_SHARE = 0.01  # share of the step below which a line is not named
BAR = 24


@dataclass(frozen=True, slots=True)
class LineShare:
    """The part of the critical path that one line of the program has."""

    line: str  # "file:line"; "": the runtime
    what: str  # the event
    seconds: float  # on the critical path
    messages: float  # seconds of it during which a message is in flight


@dataclass(frozen=True, slots=True)
class OtherLag:
    """The same program with another lag."""

    lag: int  # steps
    seconds: float  # of a step, on average
    peak_bytes: int  # of the rank that needs most memory


def critical_path_by_line(plan: Plan, timeline: Timeline) -> tuple[LineShare, ...]:
    """The critical path by lines of the program, in the order in which it comes to them."""
    known = {e.id: e for e, _ in event_paths(plan)}
    found: dict[tuple[str, str], list[float]] = {}
    for segment in timeline.critical:
        line, what = _line_text(known.get(segment.event))
        seconds = segment.stop - segment.start
        total = found.setdefault((line, what), [0.0, 0.0])
        total[0] += seconds
        total[1] += seconds if segment.kind == "message" else 0.0
    return tuple(LineShare(line, what, *seconds) for (line, what), seconds in found.items())


def _line_text(event: Event | None) -> tuple[str, str]:
    if event is None:
        return "", "the runtime"
    text = describe_event(event)
    return text.line, text.title if event.at else text.kind


def format_timeline(plan: Plan, timeline: Timeline, cluster: Cluster, lengths: Lengths, name: str,
                    other: OtherLag | None = None, given: Sequence[str] = (), peak_bytes: int = 0) -> str:
    """given: calls whose durations were given. peak_bytes: that the fullest rank needs; 0: unknown."""
    plan = visible_plan(plan)
    places, known = PlaceTexts.of(plan), {e.id: e for e, _ in event_paths(plan)}
    used = counted(plan.header.world, "rank") if plan.header.world == cluster.world else \
        f"{plan.header.world} of {counted(cluster.world, 'device')}"
    lines = [f"{name} on {cluster.name}: {used}", ""]
    lines.append(f"  step      {seconds_text(timeline.seconds):>10}      {timeline.tokens_per_second:,.0f} tokens/s")
    if timeline.average_differs:
        lines.append(f"  average   {seconds_text(timeline.average):>10}      with what runs in every K-th step, below")
    rows = [(count, lengths.of(f)) for f, count in token_frames(plan)]
    if rows:
        texts = dict.fromkeys(f"{n:,} x ({r.prompt:g} + {r.response:g})" for n, r in rows)
        lines.append(f"  lengths   {', '.join(texts)} tokens" + (" (maximum lengths)" if lengths == Lengths() else ""))
    if 0 < cluster.memory_gb * 1e9 < peak_bytes:
        lines.append(f"  memory    {human(peak_bytes):>10}      on the fullest rank: it does not fit, a device of "
                     f"{cluster.name} has {human(int(cluster.memory_gb * 1e9))}")
    lines += [f"  {what}" for what in _at_most(plan)]
    if other is not None:
        lines += [f"  lag {plan.header.lag:<5} {lag_verdict(plan.header.lag, timeline.average, other)}"]
    every = timeline.event_seconds()
    calls = [(e, every[e.id]) for e in known.values() if isinstance(e, ModelCall) and e.id in every]
    lines += ["", "  call                          longest rank  busy  where"]
    for event, seconds in calls:
        busy = _busy(timeline, event.id)
        lines.append(f"  {event.display_name:<28} {seconds_text(seconds):>13}  {busy:>4.0%}  {places.where(event)}  "
                     f"{line_of(event.at)}")
    lines += ["", "  idle"]
    meshes = {m.id: ranges_text(m.ranks) for m in plan.meshes}
    lines += [f"  ranks {cut(meshes[m], 22):<22} {share:>13.1%}" for m, share in timeline.idle]
    lines += ["", "  critical path"]
    small = [0, 0.0]
    for part in critical_path_by_line(plan, timeline):
        share = part.seconds / timeline.seconds if timeline.seconds else 0.0
        if share < MIN_SHARE:
            small = [small[0] + 1, small[1] + part.seconds]
            continue
        way = part.messages / part.seconds
        on_the_way = f"  ({way:.0%} communication)" if way > 0.005 else ""
        lines.append(f"  {cut(part.what, 28):<28} {seconds_text(part.seconds):>13}  {share:>4.0%}  "
                     f"{'█' * max(1, round(share * BAR)):<{BAR}}  {part.line}{on_the_way}")
    if small[0]:
        lines.append(f"  {f'{small[0]:.0f} smaller parts':<28} {seconds_text(small[1]):>13}  "
                     f"{small[1] / timeline.seconds:>4.0%}")
    for o in timeline.periodic:
        lines.append(f"  {which_steps(o)}: {seconds_text(o.seconds)} in addition  "
                     f"({cut(_name_inserted([known[e] for e in o.events]), 60)})")
    about = {"given, not predicted": given, "estimated from operation counts, not measured":
             [f"{m} ({why})" if why else m for m, why in timeline.estimated],
             f"assumed to be free, because {cluster.name} has no value for it": timeline.free}
    if any(about.values()):
        lines += ["", *(f"  {what}: {', '.join(names)}" for what, names in about.items() if names)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def lag_verdict(lag: int, seconds: float, other: OtherLag) -> str:
    """What the lag, or one of a step, gains or loses. seconds: of a step, on average."""
    late, plain = (seconds, other.seconds) if lag else (other.seconds, seconds)
    saved = plain - late
    share = f"{abs(saved) / plain:.0%}" if plain else "0%"
    change = f"{seconds_text(abs(saved))} ({share}) {'shorter' if saved > 0 else 'longer'}"
    if share == "0%":
        change = "as long"
    if lag:
        return f"a step is {change}{' as' if share == '0%' else ' than'} without it ({seconds_text(plain)})"
    return f"with lag=1 a step would be {change} ({seconds_text(late)}), and train on responses that are one step older"


def may_overlap(plan: Plan) -> bool:
    """Whether some ranks generate for training and other ranks work meanwhile."""
    meshes = {m.id: frozenset(m.members()) for m in plan.meshes}
    generating, working = set[int](), set[int]()
    for event, path in event_paths(plan):
        if event.traits.family == "call" and not any(getattr(block, "over", "") for block in path):
            (generating if event.new_rows else working).update(meshes[event.mesh])
    return bool(generating - working and working - generating)


def which_steps(events: PeriodicEvents) -> str:
    """"every 2 steps", "in the first 3 steps", both."""
    parts = [f"every {events.period} steps"] if events.period > 1 else []
    return ", ".join([*parts, *([f"in the first {events.first} steps"] if events.first else [])])


def _at_most(plan: Plan) -> Iterator[str]:
    """Loops whose number of iterations depends on the data, which are simulated at their bounds."""
    for loop in {b.id: b for _, path in event_paths(plan) for b in path[1:] if isinstance(b, Loop)}.values():
        if loop.until:
            yield f"loops     repeat ... until: {loop.trips:,} iterations (the maximum)"
        elif loop.over:
            yield f"loops     eval {loop.over}: {loop.trips:,} batches (the maximum)"


def _name_inserted(found: Sequence[Event]) -> str:
    """What the program asks for; where all of it was inserted, that. Frees and lengths only with nothing else."""
    for chosen in ([e for e in found if not e.because and not isinstance(e, Free | Counted)],
                   [e for e in found if not isinstance(e, Free | Counted)], found):
        if chosen:
            return ", ".join(dict.fromkeys(_line_text(e)[1] for e in chosen))
    return "nothing"


def _busy(timeline: Timeline, event: int) -> float:
    spans = [s for s in timeline.spans if s.event == event]
    length = sum(s.stop - s.start for s in spans)
    return sum(s.busy for s in spans) / length if length else 0.0


def to_json(plan: Plan, timeline: Timeline, cluster: Cluster, other: OtherLag | None = None,
            durations: Mapping[str, float] | None = None, peak_bytes: int = 0) -> str:
    known: Mapping[int, Event] = {e.id: e for e, _ in event_paths(plan)}
    every = timeline.event_seconds()
    meshes = {m.id: [list(r) for r in m.ranks] for m in plan.meshes}
    found: dict[str, Any] = {
        "format": 1, "cluster": cluster.name, "seconds": timeline.seconds,
        "average_seconds": timeline.average, "tokens": timeline.tokens,
        "tokens_per_second": timeline.tokens_per_second, "lag": plan.header.lag,
        "peak_bytes": peak_bytes, "memory_bytes": int(cluster.memory_gb * 1e9),
        "other_lag": asdict(other) if other is not None else None,
        "calls": [{"event": e.id, "call": e.display_name, "at": e.at, "seconds": every[e.id],
                   "busy": _busy(timeline, e.id)}
                  for e in known.values() if isinstance(e, ModelCall) and e.id in every],
        "idle": [{"mesh": m, "ranks": meshes[m], "share": share} for m, share in timeline.idle],
        "critical": [{"line": p.line, "what": p.what, "seconds": p.seconds, "messages": p.messages}
                     for p in critical_path_by_line(plan, timeline)],
        "classes": [[list(r) for r in ranks] for ranks in timeline.classes],
        "spans": [{"class": s.rank_class, "event": s.event, "turn": s.iteration, "start": s.start, "stop": s.stop,
                   "busy": s.busy} for s in timeline.spans],
        "every": [{"steps": o.period, "first": o.first, "events": list(o.events), "seconds": o.seconds}
                  for o in timeline.periodic],
        "estimated": [m for m, _ in timeline.estimated], "free": list(timeline.free), "given": dict(durations or {}),
    }
    return json_output(found)
