"""Why a run hung: where each rank is, which ranks wait for which in which event, and which keep the others waiting.

In: a plan, and what its ranks left (`postmortem/dumps.py`). Out: `Findings`, a pure function of both; their text is in
`postmortem/findings_text.py`.

The plan is one totally ordered list, so where two ranks are can be compared: a rank that is in an event waits for those
that exchange something with it there and have not reached it. Such waits always point backwards in that order, hence
they have no cycle, and following them ends at a rank that waits for nobody: a culprit. Only inside one event can ranks
wait for each other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from rldsl.plan.model import Plan
from rldsl.postmortem.dumps import EventRun, Heartbeat, RankDump, RankPosition
from rldsl.postmortem.wait_order import END, START, OrderKey, RankGroup, WaitOrder

Kind = Literal["not reached", "inside", "each other", "end", "start-up"]
Why = Literal["failed", "gone", "stopped", "silent", "waited for", "each other"]
ORDER: Sequence[Why] = ("gone", "stopped", "silent")
LOST_CONTACT = "RL0709"


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Everything that is known about one rank."""

    rank: int  # of the world
    position: RankPosition | None = None  # where it last was; None: it gave no sign
    dump: bool = False  # whether it left one
    silent: float = 0.0  # seconds without a new heartbeat, as others saw it; 0: none; -1: it never gave one
    process: Literal["", "running", "stopped", "gone"] = ""  # as of a `Heartbeat`
    first: bool = False  # as of a `RankDump`
    code: str = ""  # as of a `RankDump`
    reason: str = ""  # as of a `RankDump`
    time: float = 0.0  # of its dump or heartbeat, in seconds since the epoch
    line: str = ""  # of Python, that its main thread was at
    # events that it began, oldest first, where posted operations run after Python has returned: it may still wait for
    # those
    begun: tuple[EventRun, ...] = ()
    # of a lost rank: the event that it must have reached after its last heartbeat, since others have ended it
    reached: EventRun | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Some ranks wait for others, in one run of an event."""

    ranks: tuple[int, ...]  # that wait
    on: tuple[int, ...]  # the ranks that they wait for
    at: EventRun | None  # the run of an event; None: at the end of the run, or before its first event
    # what `on` have not done: reached the event, come as far inside it (or all wait for each other), or started
    kind: Kind


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that keeps others waiting."""

    rank: int  # of the world
    why: Why  # what makes it one


@dataclass(frozen=True, slots=True)
class Findings:
    """Why a run hung."""

    traces: tuple[RankTrace, ...]  # of every rank, in order
    waits: tuple[Wait, ...]  # by their place in the run
    # ranks that report a failure; else those that are gone, stopped or silent; else those that are waited for and wait
    # for nobody
    culprits: tuple[Culprit, ...]
    # of the events of the plan, kept because computing it takes long
    order: WaitOrder = field(compare=False, repr=False)


def rank_traces(world: int, dumps: Mapping[int, RankDump], signs: Mapping[int, Heartbeat]) -> tuple[RankTrace, ...]:
    """Of every rank, from its dump, else from its last heartbeat."""
    return tuple(_trace(rank, dumps.get(rank), signs.get(rank)) for rank in range(world))


def _trace(rank: int, dump: RankDump | None, sign: Heartbeat | None) -> RankTrace:
    if dump is not None and sign is not None and _woke(dump, sign):
        return RankTrace(rank, sign.position, False, sign.silent, sign.process, time=sign.time,
                         line=dump.stack[-1] if dump.stack else "")
    if dump is not None:
        begun = tuple(dict.fromkeys(e.at for e in dump.ring if e.at is not None and e.phase == "begins"))
        return RankTrace(rank, dump.position, True, first=dump.first, code=dump.code, reason=dump.reason,
                         time=dump.time, line=dump.stack[-1] if dump.stack else "", begun=begun if dump.late else ())
    if sign is None:
        return RankTrace(rank, silent=-1.0)
    return RankTrace(rank, sign.position, False, sign.silent, sign.process, time=sign.time)


def _woke(dump: RankDump, sign: Heartbeat) -> bool:
    """Whether a rank was suspended, or gave no sign, when the run ended, and left its dump later, without a message:
    what the others saw counts."""
    return bool(sign.silent) and sign.process in ("stopped", "") and dump.code in ("", LOST_CONTACT)


def analyze(plan: Plan, found: Sequence[RankTrace]) -> Findings:
    """found: of every rank of the plan, in order."""
    order = WaitOrder(plan)
    found = _with_reached(order, found)
    edges = _Waits(order, found).edges()
    grouped: dict[tuple[tuple[int, ...], EventRun | None, Kind], list[int]] = defaultdict(list)
    for edge, ranks in _waiting(edges).items():
        on = tuple(sorted({*edge.on, *ranks})) if edge.kind == "each other" else edge.on
        grouped[on, edge.at, edge.kind] += ranks
    waits = [Wait(tuple(sorted(ranks)), on, at, kind) for (on, at, kind), ranks in grouped.items()]
    waits.sort(key=lambda w: (order.place(w.at), w.ranks))
    return Findings(tuple(found), tuple(waits), tuple(_culprits(found, edges)), order)


def order_key(order: WaitOrder, trace: RankTrace) -> OrderKey:
    """How far a rank has come."""
    position = trace.position
    if position is not None and position.phase == "over":
        return END
    if position is None or position.at is None:
        return START
    return order.place(trace.reached) if trace.reached else order.place(position.at, position.phase == "ends")


def is_lost(trace: RankTrace) -> bool:
    """Whether a rank has no voice any more, as far as anybody can tell."""
    return not trace.dump and (bool(trace.silent) or trace.process in ("gone", "stopped"))


def ended_run(trace: RankTrace) -> bool:
    """Whether the run ended with this rank's own words (not with those of one that lost contact)."""
    return trace.first and trace.code != LOST_CONTACT


def _with_reached(order: WaitOrder, found: Sequence[RankTrace]) -> list[RankTrace]:
    """Of ranks that are lost, the last event, beyond their own last sign, that others can only have ended with them.
    The step before that of the others counts for a rank that was there; an earlier start of the run may have made
    it."""
    alone = [t for t in found if is_lost(t) and t.position is not None]
    ended: dict[EventRun, frozenset[int]] = {}  # runs of events, and who took part
    steps = {t.position.at.turns[:1] for t in found if t.position is not None and t.position.at is not None}
    for t in found if alone else ():
        if t.position is not None and t.position.at is not None and not is_lost(t):
            ended |= order.ended(t.position.at, order_key(order, t), t.rank)
    places = sorted(((order.place(at), at) for at in ended), key=lambda x: x[0])
    reached = {t.rank: at for t in alone for place, at in places
               if t.rank in ended[at] and place > order_key(order, t) and (at.turns in steps or _in(t, at.turns))}
    return [replace(t, reached=reached[t.rank]) if t.rank in reached else t for t in found]


def _in(trace: RankTrace, step: tuple[int, ...]) -> bool:
    """Whether a rank was in this step, or in one before it, in this start of the run."""
    turns = trace.position.at.turns if trace.position is not None and trace.position.at is not None else ()
    return bool(turns) and turns[:1] <= step


# ---------------------------------------------------------------------------------------------------- who waits


@dataclass(frozen=True, slots=True, eq=False)
class _Edge:
    """For these ranks, in this run of an event. One object for all that wait so: what grows with ranks times ranks is
    too much for the moment in which a large run fails."""

    on: tuple[int, ...]  # the ranks that they wait for
    at: EventRun | None  # as of a `Wait`
    kind: Kind  # as of a `Wait`


_Edges = Mapping[int, Sequence[_Edge]]  # of each rank


class _Waits:
    """Whom ranks wait for. found: of every rank, in order."""

    def __init__(self, order: WaitOrder, found: Sequence[RankTrace]):
        self._order, self._found = order, found
        self._places = [order_key(order, t) for t in found]
        self._kept: dict[Hashable, _Edge] = {}

    def edges(self) -> _Edges:
        return {t.rank: self._waits(t) or self._behind(t) for t in self._found if not (is_lost(t) or ended_run(t))}

    def _edge(self, key: Hashable, at: EventRun | None, kind: Kind, ranks: Callable[[], Iterable[int]]) -> list[_Edge]:
        """The one with this key; none if it is for no rank."""
        edge = self._kept.get((key, at, kind))
        if edge is None:
            edge = self._kept[key, at, kind] = _Edge(tuple(ranks()), at, kind)
        return [edge] if edge.on else []

    def _short(self, group: RankGroup, at: EventRun, rank: int) -> list[_Edge]:
        """For the others of a group that have not come to a run of an event."""
        place = self._order.place(at)
        short = self._edge(group, at, "not reached", lambda: (q for q in group.ranks if self._places[q] < place))
        return self._without(short[0], rank) if short else []

    def _waits(self, trace: RankTrace) -> list[_Edge]:
        position = trace.position
        if position is not None and position.phase == "start-up" and position.call:
            return self._edge(None, None, "start-up", self._starting)
        if position is None or position.phase in ("start-up", "ends", "calls"):
            return []
        if position.phase == "over":
            return self._edge(None, None, "end", lambda: (q for q, place in enumerate(self._places) if place != END))
        at = position.awaits if position.phase == "waits" and position.awaits else position.at
        event = self._order.events.get(at.event) if at is not None else None
        if at is None or event is None:
            return []
        if event.traits.blocking in ("async", "gather") and not (position.phase == "waits" or position.call):
            return []
        group = self._order.group(event, trace.rank)
        if short := self._short(group, at, trace.rank):
            return short
        return self._inside(trace, group, at) if position.call else []

    def _starting(self) -> Iterable[int]:
        """Ranks that have not come to an operation between ranks before their first event."""
        return (t.rank for t in self._found
                if t.position is None or t.position.phase == "start-up" and (is_lost(t) or not t.position.call))

    def _inside(self, trace: RankTrace, group: RankGroup, at: EventRun) -> list[_Edge]:
        """For others in the same event: those that have not come so far as they can, else all for each other."""
        place, rank = self._order.place(at), trace.rank
        busy = self._edge(group, at, "inside", lambda: (
            q for q in group.ranks
            if is_lost(self._found[q]) or self._places[q] == place and not _stuck(self._found[q])))
        if busy and busy[0].on != (rank,):
            return self._without(busy[0], rank)
        here = self._edge(group, at, "each other", lambda: (q for q in group.ranks if self._places[q] == place))
        waits = trace.position is not None and trace.position.phase == "waits"
        return here if here and here[0].on != (rank,) and not waits else []

    def _without(self, edge: _Edge, rank: int) -> list[_Edge]:
        """`rank` itself may be one that the others wait for."""
        i = bisect_left(edge.on, rank)
        if edge.on[i : i + 1] != (rank,):
            return [edge]
        return self._edge((edge, rank), edge.at, edge.kind, lambda: (*edge.on[:i], *edge.on[i + 1 :]))

    def _behind(self, trace: RankTrace) -> list[_Edge]:
        """Of a rank that may be ahead of what it has posted: the first event that others have not reached."""
        found: list[_Edge] = []
        for at in () if trace.position is not None and trace.position.phase == "calls" else trace.begun:
            event = self._order.events.get(at.event)
            for edge in self._short(self._order.group(event, trace.rank), at, trace.rank) if event else ():
                found += self._edge((edge, *found), at, edge.kind, partial(_others, edge, found))
        return found


def _others(edge: _Edge, before: Sequence[_Edge]) -> Iterable[int]:
    """Ranks that no edge before is for."""
    seen = {q for e in before for q in e.on}
    return [q for q in edge.on if q not in seen]


def _stuck(trace: RankTrace) -> bool:
    """Whether a rank in an event has come as far as it can: it is in an operation between the ranks of this event."""
    return trace.position is not None and bool(trace.position.call) and trace.position.phase in ("begins", "resumes")


# ---------------------------------------------------------------------------------------------------- who is to blame


def _culprits(found: Sequence[RankTrace], edges: _Edges) -> Sequence[Culprit]:
    if spoken := [Culprit(t.rank, "failed") for t in found if ended_run(t)]:
        return spoken
    silent = [Culprit(t.rank, t.process if t.process in ("gone", "stopped") else "silent") for t in found if is_lost(t)]
    # one that the system says is running may be in a long call that holds Python's lock: it is to blame if waited for
    if sure := [c for c in silent if found[c.rank].process != "running"]:
        return sorted(sure, key=lambda c: (ORDER.index(c.why), c.rank))
    waiting = _waiting(edges)
    last = {t.rank for t in found if not edges.get(t.rank)}
    waited = sorted({q for edge in waiting for q in edge.on} & last)
    if waited:
        return [Culprit(rank, "silent" if is_lost(found[rank]) else "waited for") for rank in waited]
    return [Culprit(rank, "each other") for rank in sorted(_ranks_in_cycles(waiting))] or silent


def _waiting(edges: _Edges) -> dict[_Edge, list[int]]:
    """The ranks of each edge."""
    ranks: dict[_Edge, list[int]] = defaultdict(list)
    for rank, waits in edges.items():
        for edge in waits:
            ranks[edge].append(rank)
    return ranks


def _ranks_in_cycles(waiting: Mapping[_Edge, Sequence[int]]) -> set[int]:
    """The ranks that are left when those that no other rank waits for are removed, again and again: cycles, and what
    lies between them. No rank waits for one that waits for none."""
    left = {rank for ranks in waiting.values() for rank in ranks}
    while True:
        waited = {q for edge, ranks in waiting.items() for q in _waited(edge, left.intersection(ranks))} & left
        if waited == left:
            return left
        left = waited


def _waited(edge: _Edge, by: set[int]) -> Iterable[int]:
    """Those that others than themselves wait for."""
    return edge.on if len(by) > 1 else (q for q in edge.on if by and q not in by)
