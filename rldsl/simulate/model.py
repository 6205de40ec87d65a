"""The result of a simulation: one steady step of a plan, per class of ranks. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.plan.model import Ranges


@dataclass(frozen=True, slots=True)
class Span:
    """A class of ranks in an event, from its begin to its end, including its waits. Of a loop with many iterations the
    first few have separate spans; one more span stands for all that are left."""

    rank_class: int  # number of the class
    event: int  # id
    start: float  # may be negative: a rank that is done with the step before begins this one early
    stop: float  # seconds
    busy: float  # seconds of work in it
    iteration: int = 0  # how often the event ran before in this step


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A segment of the critical path: work of a class of ranks, or a message to it, for an event."""

    rank_class: int  # number of the class
    event: int  # id
    start: float  # seconds
    stop: float  # seconds
    kind: str  # "work" or "message"


@dataclass(frozen=True, slots=True)
class PeriodicEvents:
    """Events that do not run in every step."""

    period: int  # in steps
    events: tuple[int, ...]  # ids
    # by which such a step, and those before in which parts of it run, take longer; of a block inside another, longer
    # than with the outer block alone
    seconds: float
    first: int = 0  # the number of steps, from the first on, in which they run; 0: all


@dataclass(frozen=True, slots=True)
class Timeline:
    """One steady step."""

    seconds: float  # without what does not run in every step, which is in `periodic`
    classes: tuple[Ranges, ...]  # the ranks of each class
    spans: tuple[Span, ...]  # by class and start; 0 is the end of the step before
    idle: tuple[tuple[str, float], ...]  # (mesh, share of the step in which its ranks do nothing)
    critical: tuple[PathSegment, ...]  # from 0 to `seconds`, each beginning where the last one ended
    tokens: int  # of a step
    periodic: tuple[PeriodicEvents, ...] = ()  # blocks that do not run in every step
    # (model without measurements in the cluster's file, whose times are from counted operations; how those that it has
    # differ, "" where it has none)
    estimated: tuple[tuple[str, str], ...] = ()
    free: tuple[str, ...] = ()  # rates that the plan needs and the cluster's file leaves out, counted as free

    @property
    def average(self) -> float:
        """Seconds of a step, on average over a long run: with what runs in every K-th step."""
        return self.seconds + sum(o.seconds / o.period for o in self.periodic if not o.first)

    @property
    def average_differs(self) -> bool:
        """Whether the average is visibly another one than `seconds`."""
        return self.average > self.seconds * 1.001

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def event_seconds(self) -> dict[int, float]:
        """Event -> the longest that a class spends in it in a step, all iterations together."""
        by: dict[tuple[int, int], float] = {}
        for span in self.spans:
            key = (span.event, span.rank_class)
            by[key] = by.get(key, 0.0) + span.stop - span.start
        found: dict[int, float] = {}
        for (event, _), seconds in by.items():
            found[event] = max(found.get(event, 0.0), seconds)
        return found
