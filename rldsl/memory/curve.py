"""The memory of a rank over a step, as holdings with lifetimes.

In: holdings. Out: bytes at every moment, and the peak. The i-th of a curve's events has the moments 2i (before it),
2i + 1 (while it runs) and 2i + 2 (after it, which is before the next one). A holding includes its first and last
moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from rldsl.plan.model import Plan, Ranges


@dataclass(frozen=True, slots=True)
class Holding:
    """Something that a rank holds for a while."""

    what: str  # for people: "gradients of actor"
    bytes: int  # that it takes
    start: int  # first moment
    stop: int  # last moment
    host: bool = False  # in host memory, where the device has separate memory


@dataclass(frozen=True, slots=True)
class Curve:
    """What a class of ranks holds over one step in the middle of the run: what stays from step to step is held from the
    beginning."""

    ranks: Ranges  # of the class
    events: tuple[int, ...]  # ids of the events that they take part in, in order
    holdings: tuple[Holding, ...]  # what they hold, and when


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes on the device before, while, and after an event runs."""

    event: int  # id
    before: int  # bytes
    during: int  # the peak
    after: int  # bytes


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds on its device."""

    bytes: int  # on the device
    event: int = -1  # the event at that moment; -1: there is none
    holders: tuple[tuple[str, int], ...] = ()  # (what, bytes), the largest first; they add up to `bytes`


def points(curve: Curve) -> tuple[Point, ...]:
    """The curve, event by event. An event begins with what is held before it, even if it frees some of it at once."""
    totals = _totals(curve)
    return tuple(Point(id, before, max(before, during), after) for i, id in enumerate(curve.events)
                 for before, during, after in [totals[2 * i : 2 * i + 3]])


def peak(curve: Curve) -> Peak:
    """The first moment with the most bytes."""
    totals = _totals(curve)
    moment = max(range(len(totals)), key=lambda m: (totals[m], -m))
    at = min(moment // 2, len(curve.events) - 1)
    return Peak(totals[moment], curve.events[at] if curve.events else -1, _held(curve, moment))


def peaks(curves: tuple[Curve, ...]) -> dict[int, Peak]:
    """Rank -> peak."""
    peak_of = {id(c): peak(c) for c in curves}
    return {rank: peak_of[id(c)] for rank, c in each_rank(curves)}


def during(curve: Curve, event: int) -> tuple[tuple[str, int], ...]:
    """(what, bytes) held on the device while an event runs, the largest first."""
    return _held(curve, 2 * curve.events.index(event) + 1)


def host_peak(curve: Curve) -> int:
    """The most that is held in host memory: what is offloaded, and checkpoints on their way to the disk."""
    return max(_totals(curve, host=True))


def _held(curve: Curve, moment: int) -> tuple[tuple[str, int], ...]:
    held: dict[str, int] = {}
    for h in curve.holdings:
        if h.start <= moment <= h.stop and not h.host:
            held[h.what] = held.get(h.what, 0) + h.bytes
    return tuple(sorted(held.items(), key=lambda x: (-x[1], x[0])))


def _totals(curve: Curve, host: bool = False) -> list[int]:
    """Bytes at every moment."""
    changes = [0] * (2 * len(curve.events) + 2)
    for h in curve.holdings:
        if h.host == host:
            changes[h.start] += h.bytes
            changes[h.stop + 1] -= h.bytes
    return list(accumulate(changes[:-1]))


def each_rank(curves: tuple[Curve, ...]) -> Iterator[tuple[int, Curve]]:
    """Every rank with its curve."""
    for curve in curves:
        for start, stop in curve.ranks:
            for rank in range(start, stop):
                yield rank, curve


def left_out(plan: Plan) -> tuple[str, ...]:
    """What the estimates of a plan's models are known to leave out, a sentence for each model."""
    return tuple(f"not counted of `{m.name}`: {m.sizes.uncounted}" for m in plan.models if m.sizes.uncounted)
