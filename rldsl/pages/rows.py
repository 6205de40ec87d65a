"""A timeline as the rows of a picture: ranks that do the same at the same times share one.

In: a simulated `Timeline`. Out: `Row`s, in the order of their first ranks; ten thousand ranks make a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rldsl.plan.model import Ranges
from rldsl.plan.projection import to_ranges
from rldsl.simulate import Span, Timeline

ALIKE = 1 / 400  # of the whole time: below it two bars look the same
SEEN = 1 / 3000  # below it a bar is not drawn


@dataclass(frozen=True, slots=True)
class Bar:
    """An event in a row."""

    event: int  # id
    start: float  # seconds
    stop: float  # seconds
    busy: float | None = None  # the share of it in which its ranks compute; None: unknown
    iteration: int = 0  # how often the event ran before in the step
    step: int = 0  # of several that are shown, the one that it belongs to; 0: none


@dataclass(frozen=True, slots=True)
class Row:
    """The events of ranks whose bars look the same."""

    ranks: Ranges  # that have such bars
    first: int  # the rank whose bars they are
    bars: tuple[Bar, ...]  # by start
    critical: tuple[tuple[float, float], ...] = ()  # (start, stop) where the critical path runs through this row


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows over the time from start to stop."""

    rows: tuple[Row, ...]  # by rank
    start: float  # seconds
    stop: float  # seconds
    hidden: int = 0  # bars that are too short to see

    @property
    def length(self) -> float:
        return self.stop - self.start


def simulated(timeline: Timeline) -> Chart:
    """A steady step."""
    start = min((s.start for s in timeline.spans), default=0.0)
    stop = max([timeline.seconds, start + 1e-9, *(s.stop for s in timeline.spans)])
    by: dict[int, list[Span]] = {c: [] for c in range(len(timeline.classes))}
    for span in timeline.spans:
        by[span.rank_class].append(span)
    alike: list[list[int]] = []
    found: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}  # what ranks do -> rows; only such can be alike
    for c, spans in by.items():
        rows = found.setdefault(tuple((s.event, s.iteration) for s in spans), [])
        same = next((row for row in rows if _alike(by[row[0]], spans, (stop - start) * ALIKE)), None)
        if same is None:
            rows.append([c])
            alike.append(rows[-1])
        else:
            same.append(c)
    critical: dict[int, list[tuple[float, float]]] = {}
    for hop in timeline.critical:
        critical.setdefault(hop.rank_class, []).append((hop.start, hop.stop))
    made = [Row(_together(timeline.classes[c] for c in row), timeline.classes[row[0]][0][0],
                tuple(Bar(s.event, s.start, s.stop, s.busy / (s.stop - s.start) if s.stop > s.start else None,
                          s.iteration) for s in by[row[0]]),
                _joined([x for c in row for x in critical.get(c, [])], (stop - start) * SEEN)) for row in alike]
    return chart(made, start, stop)


def several(one: Chart, seconds: float, count: int, ahead: Mapping[int, int]) -> Chart:
    """`count` iterations of the step loop, from iteration 1 on, where one follows another after `seconds`. ahead: by
    how many steps each event runs ahead, of those that belong to a step."""
    def at(bar: Bar, iteration: int) -> Bar:
        after = (iteration - 1) * seconds
        return replace(bar, start=bar.start + after, stop=bar.stop + after,
                       step=iteration + ahead[bar.event] if bar.event in ahead else 0)

    iterations = range(1, count + 1)
    starts = [(t - 1) * seconds for t in iterations]
    rows = (replace(row, bars=tuple(at(b, t) for t in iterations for b in row.bars),
                    critical=tuple((a + s, b + s) for s in starts for a, b in row.critical)) for row in one.rows)
    return Chart(tuple(rows), one.start, one.stop + (count - 1) * seconds, one.hidden)


def chart(rows: Iterable[Row], start: float, stop: float) -> Chart:
    """Rows without the bars that nobody could see."""
    least, hidden, kept = (stop - start) * SEEN, 0, []
    for row in rows:
        bars = tuple(b for b in row.bars if b.stop - b.start >= least)
        hidden += len(row.bars) - len(bars)
        kept.append(Row(row.ranks, row.first, bars, row.critical))
    return Chart(tuple(sorted(kept, key=lambda r: r.ranks)), start, stop, hidden)


def _alike(one: Sequence[Span], other: Sequence[Span], most: float) -> bool:
    """Whether the same events run at nearly the same times."""
    return all(abs(a.start - b.start) <= most and abs(a.stop - b.stop) <= most and abs(a.busy - b.busy) <= 4 * most
               for a, b in zip(one, other, strict=True))


def _together(ranges: Iterable[Ranges]) -> Ranges:
    return to_ranges(sorted(rank for each in ranges for a, b in each for rank in range(a, b)))


def _joined(found: list[tuple[float, float]], gap: float) -> tuple[tuple[float, float], ...]:
    """Intervals with those that nearly touch as one."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(found):
        if joined and start - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(x for x in joined if x[1] - x[0] >= gap)
