"""The memory of a rank over a step, as holdings with lifetimes.

In: holdings. Out: bytes at every moment, and the largest. An event i of n (in the order of the curve's events) has the
moments 2i (before it), 2i + 1 (while it runs) and 2i + 2 (after it, which is before the next one); so a holding that
lives from moment a to b, both included, is held by plain comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from rldsl.plan.model import Ranges


@dataclass(frozen=True, slots=True)
class Holding:
    """what: for people, "gradients of actor". start, stop: first and last moment. host: in host memory, where the
    device has memory of its own."""

    what: str
    bytes: int
    start: int
    stop: int
    host: bool = False


@dataclass(frozen=True, slots=True)
class Curve:
    """Ranks that hold the same at all times. events: ids of the events that they take part in, in order. The step that
    it shows is one in the middle of the run: what is made in the first step and stays is there from the beginning."""

    ranks: Ranges
    events: tuple[int, ...]
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes on the device before, at most while, and after an event runs."""

    event: int
    before: int
    during: int
    after: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds on its device, and while which event (-1: no event at all). holders: what, and how
    much, the largest first; they add up to `bytes`."""

    bytes: int
    event: int = -1
    holders: tuple[tuple[str, int], ...] = ()


def points(curve: Curve) -> tuple[Point, ...]:
    """The curve, event by event. An event begins with what is there before it, even if it lets go of some at once."""
    totals = _totals(curve)
    return tuple(Point(id, before, max(before, during), after) for i, id in enumerate(curve.events)
                 for before, during, after in [totals[2 * i : 2 * i + 3]])


def peak(curve: Curve) -> Peak:
    """The first of the moments with the most bytes, or `Peak(0)`."""
    totals = _totals(curve)
    moment = max(range(len(totals)), key=lambda m: (totals[m], -m))
    at = min(moment // 2, len(curve.events) - 1)
    return Peak(totals[moment], curve.events[at] if curve.events else -1, _held(curve, moment))


def peaks(curves: tuple[Curve, ...]) -> dict[int, Peak]:
    """Of every rank."""
    known = {id(c): peak(c) for c in curves}
    return {rank: known[id(c)] for rank, c in each_rank(curves)}


def during(curve: Curve, event: int) -> tuple[tuple[str, int], ...]:
    """What is held on the device while an event runs, the largest first."""
    return _held(curve, 2 * curve.events.index(event) + 1)


def host_peak(curve: Curve) -> int:
    """The most that is held in host memory: what is offloaded, and checkpoints on their way to the disk."""
    return max(_totals(curve, host=True))


def _held(curve: Curve, moment: int) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for h in curve.holdings:
        if h.start <= moment <= h.stop and not h.host:
            found[h.what] = found.get(h.what, 0) + h.bytes
    return tuple(sorted(found.items(), key=lambda x: (-x[1], x[0])))


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
