"""Why a run stood still: where each rank is, who waits for whom in which event, and who keeps the others waiting.

In: a plan, and what its ranks left (`plan/dumps.py`). Out: `Findings`, a pure function of both; their text is in
`plan/postmortem_text.py`.

The plan is one totally ordered list, so where two ranks are can be compared: a rank that is in an event waits for those
that exchange something with it there and have not reached it. Such waits always point backwards in that order, hence
they have no cycle, and following them ends at a rank that waits for nobody: a culprit. Only inside one event can ranks
wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rldsl.plan.dumps import Dump, Moment, Sign, Stand
from rldsl.plan.model import Plan
from rldsl.plan.order import END, POSTED, START, Order, Place

Kind = Literal["not reached", "inside", "each other", "end"]
Why = Literal["failed", "gone", "stopped", "silent", "waited for", "each other"]
ORDER: Sequence[Why] = ("gone", "stopped", "silent")
LOST_CONTACT = "RL0709"


@dataclass(frozen=True, slots=True)
class Trace:
    """All that is known of one rank. dump: it left one. silent: for how many seconds it gave no new sign of life, -1
    when it never gave one; 0 when it did. line: of Python, that it was at. begun: what it did before, oldest first;
    only where posts run behind Python, so that it may wait for those still. reached: of one that is lost, what it must
    have come to after its last sign: others have ended it, and cannot have without it."""

    rank: int
    stand: Stand | None = None
    dump: bool = False
    silent: float = 0.0
    process: Literal["", "running", "stopped", "gone"] = ""
    first: bool = False
    code: str = ""
    reason: str = ""
    time: float = 0.0
    line: str = ""
    begun: tuple[Moment, ...] = ()
    reached: Moment | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Some ranks for others, in one run of an event (None: at the end of the run). kind: these have not reached it;
    they are inside of it too and have not come so far; all wait there for each other."""

    ranks: tuple[int, ...]
    on: tuple[int, ...]
    at: Moment | None
    kind: Kind


@dataclass(frozen=True, slots=True)
class Culprit:
    rank: int
    why: Why


@dataclass(frozen=True, slots=True)
class Findings:
    """traces: of every rank of the plan, in order. waits: by their place in the run. culprits: those whose own words
    end the run; else those that are gone, stopped or silent; else those that are waited for and wait for nobody."""

    traces: tuple[Trace, ...]
    waits: tuple[Wait, ...]
    culprits: tuple[Culprit, ...]


def traces(world: int, dumps: Mapping[int, Dump], signs: Mapping[int, Sign]) -> tuple[Trace, ...]:
    """Of every rank, from its dump, else from its last sign of life."""
    return tuple(_trace(rank, dumps.get(rank), signs.get(rank)) for rank in range(world))


def _trace(rank: int, dump: Dump | None, sign: Sign | None) -> Trace:
    if dump is not None:
        begun = tuple(dict.fromkeys(e.at for e in dump.ring if e.at is not None and e.phase == "begins"))
        return Trace(rank, dump.stand, True, first=dump.first, code=dump.code, reason=dump.reason, time=dump.time,
                     line=dump.stack[-1] if dump.stack else "", begun=begun if dump.late else ())
    if sign is None:
        return Trace(rank, silent=-1.0)
    return Trace(rank, sign.stand, False, sign.silent, sign.process, time=sign.time)


def analyse(plan: Plan, found: Sequence[Trace]) -> Findings:
    """found: of every rank of the plan, in order."""
    order = Order(plan)
    found = _with_reached(order, found)
    edges = _edges(order, found)
    grouped: dict[tuple[tuple[int, ...], Moment | None, Kind], list[int]] = defaultdict(list)
    for rank, waits in edges.items():
        for on, at, kind in waits:
            grouped[tuple(sorted((*on, rank))) if kind == "each other" else on, at, kind].append(rank)
    waits = [Wait(tuple(ranks), on, at, kind) for (on, at, kind), ranks in grouped.items()]
    waits.sort(key=lambda w: (order.place(w.at), w.ranks))
    return Findings(tuple(found), tuple(waits), tuple(_culprits(found, edges)))


def where(order: Order, trace: Trace) -> Place:
    """How far a rank has come."""
    stand = trace.stand
    if stand is not None and stand.phase == "over":
        return END
    if stand is None or stand.at is None:
        return START
    return order.place(trace.reached) if trace.reached else order.place(stand.at, stand.phase == "ends")


def lost(trace: Trace) -> bool:
    """Whether a rank has no voice any more, as far as anybody can tell."""
    return not trace.dump and (bool(trace.silent) or trace.process in ("gone", "stopped"))


def spoke(trace: Trace) -> bool:
    """Whether the run ended with this rank's own words (not with those of one that lost contact)."""
    return trace.first and trace.code != LOST_CONTACT


def _with_reached(order: Order, found: Sequence[Trace]) -> list[Trace]:
    """Of ranks that are lost, the last event, beyond their own last sign, that others can only have ended with them.
    The step before that of the others counts for a rank that was there; an earlier start of the run may have made
    it."""
    alone = [t for t in found if lost(t) and t.stand is not None]
    ended: dict[Moment, frozenset[int]] = {}  # runs of events, and who took part
    steps = {t.stand.at.turns[:1] for t in found if t.stand is not None and t.stand.at is not None}
    for t in found if alone else ():
        if t.stand is not None and t.stand.at is not None and not lost(t):
            ended |= order.ended(t.stand.at, where(order, t), t.rank)
    places = sorted(((order.place(at), at) for at in ended), key=lambda x: x[0])
    reached = {t.rank: at for t in alone for place, at in places
               if t.rank in ended[at] and place > where(order, t) and (at.turns in steps or _in(t, at.turns))}
    return [replace(t, reached=reached[t.rank]) if t.rank in reached else t for t in found]


def _in(trace: Trace, step: tuple[int, ...]) -> bool:
    """Whether a rank was in this step, or in one before it, in this start of the run."""
    turns = trace.stand.at.turns if trace.stand is not None and trace.stand.at is not None else ()
    return bool(turns) and turns[:1] <= step


# ---------------------------------------------------------------------------------------------------- who waits

_Edge = tuple[tuple[int, ...], Moment | None, Kind]  # for these ranks, in this run of an event
_Edges = Mapping[int, Sequence[_Edge]]  # of each rank


def _edges(order: Order, found: Sequence[Trace]) -> _Edges:
    places = [where(order, t) for t in found]
    return {t.rank: _waits(order, t, found, places) or _behind(order, t, places)
            for t in found if not (lost(t) or spoke(t))}


def _waits(order: Order, trace: Trace, found: Sequence[Trace], places: Sequence[Place]) -> list[_Edge]:
    stand = trace.stand
    if stand is None or stand.phase in ("start-up", "ends", "calls"):
        return []
    if stand.phase == "over":
        short = tuple(q for q, place in enumerate(places) if place != END)
        return [(short, None, "end")] if short else []
    at = stand.awaits if stand.phase == "waits" and stand.awaits else stand.at
    event = order.events.get(at.event) if at is not None else None
    if event is None or isinstance(event, POSTED) and not (stand.phase == "waits" or stand.call):
        return []
    partners, place = order.partners(event, trace.rank), order.place(at)
    if short := tuple(q for q in partners if places[q] < place):
        return [(short, at, "not reached")]
    if not stand.call:
        return []
    here = tuple(q for q in partners if places[q] == place or lost(found[q]))
    if busy := tuple(q for q in here if lost(found[q]) or not _stuck(found[q])):
        return [(busy, at, "inside")]
    return [(here, at, "each other")] if here and stand.phase != "waits" else []


def _stuck(trace: Trace) -> bool:
    """Whether a rank in an event has come as far as it can: it is in an operation between the ranks of this event."""
    return trace.stand is not None and bool(trace.stand.call) and trace.stand.phase in ("begins", "goes on")


def _behind(order: Order, trace: Trace, places: Sequence[Place]) -> list[_Edge]:
    """Of a rank that may be ahead of what it has posted: the first event that others have not reached."""
    found: list[_Edge] = []
    seen: set[int] = set()
    for at in () if trace.stand is not None and trace.stand.phase == "calls" else trace.begun:
        event, place = order.events.get(at.event), order.place(at)
        short = tuple(q for q in (order.partners(event, trace.rank) if event else ())
                      if q not in seen and places[q] < place)
        if short:
            found.append((short, at, "not reached"))
            seen.update(short)
    return found


# ---------------------------------------------------------------------------------------------------- who is to blame


def _culprits(found: Sequence[Trace], edges: _Edges) -> Sequence[Culprit]:
    if spoken := [Culprit(t.rank, "failed") for t in found if spoke(t)]:
        return spoken
    silent = [Culprit(t.rank, t.process if t.process in ("gone", "stopped") else "silent") for t in found if lost(t)]
    # one that the system says is running may be in a long call that holds Python's lock: it is to blame if waited for
    if sure := [c for c in silent if found[c.rank].process != "running"]:
        return sorted(sure, key=lambda c: (ORDER.index(c.why), c.rank))
    on = {rank: {q for ranks, _, _ in waits for q in ranks if q != rank} for rank, waits in edges.items()}
    last = {t.rank for t in found if not on.get(t.rank)}
    waited = sorted({q for ranks in on.values() for q in ranks} & last)
    if waited:
        return [Culprit(rank, "silent" if lost(found[rank]) else "waited for") for rank in waited]
    return [Culprit(rank, "each other") for rank in sorted(_circle(on))] or silent


def _circle(on: Mapping[int, set[int]]) -> set[int]:
    """The ranks that are left when those that nobody waits for are taken away, again and again. Nobody waits for a rank
    that waits for none."""
    left = {rank for rank in on if on[rank]}
    while (waited := {q for rank in left for q in on[rank]} & left) != left:
        left = waited
    return left
