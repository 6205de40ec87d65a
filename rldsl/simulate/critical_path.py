"""The critical path: the work and messages that determine how long a step takes.

In: a simulation. Out: segments, found backwards from the end of a step: the work that ended last, the message that it
waited for, the work of the class that was last ready for that message, and so on. Each segment begins where the one
before it ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from rldsl.simulate.engine import Timelines
from rldsl.simulate.model import PathSegment


def find_critical_path(timelines: Timelines, c: int, stop: float, start: float) -> tuple[PathSegment, ...]:
    """The path that ends with class `c` at `stop`, back to `start`; times from `start`."""
    segments: list[PathSegment] = []
    at = stop
    ends = [[p.stop for p in intervals] for intervals in timelines.intervals]
    while at > start:
        i = bisect_left(ends[c], at)
        interval = timelines.intervals[c][i]
        if interval.stop != at:
            raise ValueError(f"no operation of class {c} ended at {at}")
        if interval.key is None:
            begin = max(interval.start, start) - start
            segments.append(PathSegment(c, interval.begin.event, begin, at - start, "work"))
            at = interval.start
            continue
        message = timelines.messages[interval.key]
        if message.done > message.began and message.at is not None:
            segments.append(PathSegment(c, message.at.event, max(message.began, start) - start, at - start, "message"))
        at, c = message.began, message.last
    return _merge_segments(reversed(segments))


def _merge_segments(segments: Iterable[PathSegment]) -> tuple[PathSegment, ...]:
    """Consecutive segments of the same kind, class and event as one."""
    found: list[PathSegment] = []
    for segment in segments:
        last = found[-1] if found else None
        if last is not None and _subject(last) == _subject(segment):
            found[-1] = replace(last, stop=segment.stop)
        else:
            found.append(segment)
    return tuple(found)


def _subject(segment: PathSegment) -> tuple[int, int, str]:
    return segment.rank_class, segment.event, segment.kind
