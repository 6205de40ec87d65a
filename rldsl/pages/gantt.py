"""Rows over time as SVG: a bar for each event, filled as far as its ranks work, and a line below what others wait for.
Below the rows, on the same axis, the memory of ranks.

In: a `Chart`, what its events are, and `Strip`s. Out: an SVG element. Places along the time are shares of its width, so
that a page zooms by making it wider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10

from markupsafe import Markup

from rldsl.pages.markup import element, number, percent
from rldsl.pages.rows import Bar, Chart, Row
from rldsl.plan.events import Event, ModelCall
from rldsl.plan.naming import describe_event
from rldsl.plan.notation import seconds_text

HEIGHT, BAR, AXIS = 38, 26, 26  # of a row, of a bar in it, of the axis
STRIP, STEPS = 44, 10_000  # height of a strip of memory; its units from left to right
LETTER, WIDE = 6.7, 900  # width of a letter; of the whole picture before it is zoomed
TICKS = 8


@dataclass(frozen=True, slots=True)
class Drawn:
    """How an event is drawn."""

    label: str  # in the bar
    about: str  # when the pointer is over it
    style: str  # classes of CSS


@dataclass(frozen=True, slots=True)
class Strip:
    """The memory of ranks over the time of a chart."""

    ranks: str  # whose memory it is
    points: tuple[tuple[float, int], ...]  # (seconds, bytes from then on)
    top: int  # bytes at the upper end
    about: str  # when the pointer is over it


def drawn(event: Event, styles: Mapping[str, str], titles: Mapping[int, str]) -> Drawn:
    """styles: of models. titles: of events that the dataflow graph shows."""
    text = describe_event(event)
    if event.traits.color != "mesh":
        return Drawn(text.title, text.title, event.traits.color)
    label = titles.get(event.id) or text.subject
    style = styles[event.model] if isinstance(event, ModelCall) else "compute"
    about = label if event.traits.family == "call" else f"{text.kind} {label}".strip()
    return Drawn(label, about, style)


def gantt(chart: Chart, known: Mapping[int, Drawn], title: str, strips: Sequence[Strip] = ()) -> Markup:
    rows = AXIS + HEIGHT * len(chart.rows)
    height = rows + STRIP * len(strips)
    parts = [element("title", title), element("g", *_ticks(chart, height), class_="ticks")]
    for i, row in enumerate(chart.rows):
        parts.append(element("rect", class_="lane", x=0, y=AXIS + HEIGHT * i, width="100%", height=HEIGHT - 6, rx=4))
        parts += _row(chart, row, AXIS + HEIGHT * i + 2, known)
    parts += [_strip(chart, strip, rows + STRIP * i) for i, strip in enumerate(strips)]
    return element("svg", *parts, class_="bars", width="100%", height=height, role="group", aria_label=title,
                   data_start=f"{chart.start:.9g}", data_length=f"{chart.length:.9g}")


def _row(chart: Chart, row: Row, y: float, known: Mapping[int, Drawn]) -> list[Markup]:
    found = [_bar(chart, bar, y, known[bar.event]) for bar in row.bars]
    return found + [element("rect", class_="critical", x=_at(chart, a), width=percent((b - a) / chart.length),
                            y=y + BAR + 1, height=2.5) for a, b in row.critical]


def _strip(chart: Chart, strip: Strip, y: float) -> Markup:
    """An area of steps, which is stretched over the width as the bars are."""
    high, text = STRIP - 8, ""
    stops = [*(start for start, _ in strip.points[1:]), chart.stop]
    for (start, size), stop in zip(strip.points, stops, strict=False):  # without points, there is one stop
        left, right = (number(STEPS * min(max((t - chart.start) / chart.length, 0.0), 1.0), 1) for t in (start, stop))
        level = number(high * (1 - min(size / max(strip.top, 1), 1.0)), 1)
        text += f"{'L' if text else f'M{left} {high}L'}{left} {level}L{right} {level}"
    text = f"{text}V{high}Z" if text else "M0 0"
    return element("svg", element("title", strip.about), element("rect", class_="lane", width=STEPS, height=high),
                   element("path", d=text), class_="strip", x=0, y=y, width="100%", height=high,
                   view_box=f"0 0 {STEPS} {high}", preserveAspectRatio="none", role="img", aria_label=strip.about)


def _bar(chart: Chart, bar: Bar, y: float, event: Drawn) -> Markup:
    length, share = bar.stop - bar.start, (bar.stop - bar.start) / chart.length
    tooltip = f"{event.about}: {seconds_text(length)}, from {seconds_text(bar.start)}"
    tooltip += f", busy {bar.busy:.0%} of the time" if bar.busy is not None else ""
    tooltip += f", iteration {bar.iteration + 1}" if bar.iteration else ""
    tooltip += f", of step {bar.step}" if bar.step else ""
    label = f"{bar.step} · {event.label}" if bar.step else event.label
    full = bar.busy is None or bar.busy > 0.995
    inside = [element("rect", class_="wait", width="100%", height=BAR, rx=3)]
    if full or bar.busy:
        high = BAR * (1.0 if full else bar.busy or 0.0)
        inside.append(element("rect", class_="work", width="100%", y=BAR - high, height=high, rx=3))
    room = len(label) * LETTER + 10
    inside.append(element("text", label, x=6, y=BAR / 2 + 4, class_="tight" if share * WIDE < room else None))
    box = element("svg", *inside, x=_at(chart, bar.start), y=y, width=percent(share), height=BAR)
    return element("a", element("title", tooltip), box, href=f"#e{bar.event}", data_event=bar.event, tabindex=-1,
                   class_=f"slot {event.style}{' other' if bar.step % 2 else ''}")


def _at(chart: Chart, seconds: float) -> str:
    return percent((seconds - chart.start) / chart.length)


def tick(length: float) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten."""
    rough = length / TICKS
    power = 10.0 ** floor(log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)


def _ticks(chart: Chart, height: float) -> list[Markup]:
    step = tick(chart.length)
    first = -floor(-chart.start / step + 1e-9)
    found = []
    for i in range(first, first + 2 * TICKS + 2):
        if i * step <= chart.stop:
            x = _at(chart, i * step)
            found += [element("line", x1=x, x2=x, y1=AXIS - 6, y2=height),
                      element("text", _tick_text(i * step, step, chart.length), x=x, y=12, dx=3)]
    return found


def _tick_text(at: float, step: float, length: float) -> str:
    """As many digits as the step has, in the unit of the whole; templates/report.js does the same when it zooms."""
    factor, unit = (1.0, "s") if length >= 1 else (1e3, "ms")
    return f"{at * factor:.{max(0, -floor(log10(step * factor) + 1e-09))}f} {unit}"
