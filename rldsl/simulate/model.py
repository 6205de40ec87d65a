"""What a simulation finds: one steady step of a plan, as every class of ranks goes through it. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.model import Ranges


@dataclass(frozen=True, slots=True)
class Span:
    """A class of ranks in an event, from its begin to its end, waits inside it included. start may be negative: a rank
    that is done with the step before begins this one while others are not. busy: seconds of work in it. turn: how often
    the event ran before in this step. Of a loop of many turns the first few have spans of their own, and then one
    stands for all that are left."""

    rank_class: int
    event: int
    start: float
    stop: float
    busy: float
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Hop:
    """A part of the critical path: work of a class of ranks, or a message to it, for an event."""

    rank_class: int
    event: int
    start: float
    stop: float
    kind: str  # "work" or "message"


@dataclass(frozen=True, slots=True)
class Occasion:
    """What happens in each `period`-th step alone, and how much longer that step takes; where it stands in another one,
    longer than with that. events: of it."""

    period: int
    events: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """seconds: of a steady step, without what stands under `every` (that is in `occasions`). classes: ranks that do the
    same at the same times. spans: of one step, by class and start; 0 is the end of the step before. idle: mesh id ->
    share of the step in which its ranks do nothing. critical: hops from 0 to `seconds`, each beginning where the last
    ended. tokens: of a step. estimated: models whose times come from counted operations, since the cluster's file has
    no measurements of them. free: rates and latencies that the plan needs and the cluster's file leaves out, so that
    they cost nothing here."""

    seconds: float
    classes: tuple[Ranges, ...]
    spans: tuple[Span, ...]
    idle: tuple[tuple[str, float], ...]
    critical: tuple[Hop, ...]
    tokens: int
    occasions: tuple[Occasion, ...] = ()
    estimated: tuple[str, ...] = ()
    free: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def event_seconds(self) -> dict[int, float]:
        """Event -> the longest that a class spends in it in a step, all turns together."""
        by: dict[tuple[int, int], float] = {}
        for span in self.spans:
            key = (span.event, span.rank_class)
            by[key] = by.get(key, 0.0) + span.stop - span.start
        found: dict[int, float] = {}
        for (event, _), seconds in by.items():
            found[event] = max(found.get(event, 0.0), seconds)
        return found
