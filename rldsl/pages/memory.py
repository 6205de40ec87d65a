"""The memory of ranks over a step as SVG: what holds it, stacked, up to the limit of the device.

In: the curves of `rldsl/memory`, and how long each event takes in the simulated step. Out: a `Panel` for each set of
ranks with the same curve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rldsl.memory.curve import Curve, Peak, during, peak, points
from rldsl.pages.markup import element, number
from rldsl.plan.events import Event, ModelCall
from rldsl.plan.model import Ranges
from rldsl.plan.naming import describe_event
from rldsl.plan.notation import human
from rldsl.plan.projection import to_ranges

KINDS = ("parameters", "optimizer state", "gradients", "activations", "KV cache", "values and transfers")
MOST = 12  # panels
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 560.0, 190.0, 52.0, 14.0, 32.0
Scale = Callable[[float], float]  # bytes -> y
Steps = list[tuple[int, int, int, int]]
LETTER = 5.6  # width of a letter below the curve
SEEN = 0.004  # of the step: the least width of an event
ALIKE = 0.004  # of the peak: below it two curves look the same


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve, for all ranks whose curves look like it."""

    ranks: Ranges  # whose curves look like this one
    curve: Curve  # of the first of them
    peak: Peak  # of that curve


def panels(curves: Sequence[Curve]) -> tuple[Panel, ...]:
    """Curves that look the same as one; in the order of their first ranks."""
    found: list[list[Curve]] = []
    seen: dict[tuple[int, ...], list[tuple[Steps, list[Curve]]]] = {}  # events that matter -> curves; only such can be
    for curve in curves:                                               # alike
        steps = _steps(curve)
        rows = seen.setdefault(tuple(x[0] for x in steps), [])
        same = next((each for other, each in rows if _alike(other, steps)), None)
        if same is None:
            found.append([curve])
            rows.append((steps, found[-1]))
        else:
            same.append(curve)
    return tuple(Panel(to_ranges(sorted(r for c in each for a, b in c.ranks for r in range(a, b))), each[0],
                       max((peak(c) for c in each), key=lambda p: p.bytes)) for each in found)


def _alike(one: Steps, other: Steps) -> bool:
    """Whether the same events hold nearly the same."""
    most = ALIKE * max([1, *(x for _, *values in one for x in values)])
    return all(abs(m - n) <= most for x, y in zip(one, other, strict=True) for m, n in zip(x[1:], y[1:], strict=True))


def _steps(curve: Curve) -> Steps:
    """The events that change something, with the bytes before, while and after them."""
    found = [(p.event, p.before, p.during, p.after) for p in points(curve)]
    most = ALIKE / 2 * max([1, *(x[2] for x in found)])
    return [x for x in found if max(x[1:]) - min(x[1:]) > most]


def over_time(curve: Curve, ran: Iterable[tuple[int, float, float]]) -> tuple[tuple[float, int], ...]:
    """(seconds, bytes from then on) for a rank that ran these (event, start, stop). While two events overlap, it holds
    what the later one holds in the plan's order, where a buffer under way counts for both."""
    held = {p.event: p for p in points(curve)}
    spans = sorted(((start, stop, held[event]) for event, start, stop in ran if event in held), key=lambda x: x[:2])
    found: list[tuple[float, int]] = []
    for i, (start, stop, point) in enumerate(spans):
        found.append((start, point.during))
        if i + 1 == len(spans) or stop <= spans[i + 1][0]:
            found.append((stop, point.after))
    return tuple(found)


def category(what: str) -> str:
    """Of what is held, as `Holding.what` names it."""
    beginning = "optimizer state" if what.startswith("optimizer") else what
    return next((k for k in KINDS[:-1] if beginning.startswith(k)), KINDS[-1])


def scale(panels: Sequence[Panel], limit: int) -> int:
    """Bytes at the top of every panel: the limit, where the peaks come near enough to it to be seen."""
    most = max((p.peak.bytes for p in panels), default=0)
    return max(limit, most) if limit and most >= limit / 2 else most


def draw(panel: Panel, known: Mapping[int, Event], durations: Mapping[int, float], top: int, limit: int,
         title: str) -> Markup:
    """durations: event -> simulated seconds in a step. top: bytes at the upper end. limit: of the device; 0: unknown.
    """
    curve, top = panel.curve, max(top, 1)
    edges = _edges(curve, durations)
    bottom = HEIGHT - BOTTOM

    def y(size: float) -> float:
        return bottom - (bottom - TOP) * size / top * 0.94

    parts = [element("title", title), *_axis(top, y)]
    stacked = [0.0] * (2 * len(curve.events) + 1)
    for name in KINDS:
        held = _moments(curve, name)
        if any(held):
            above = [a + b for a, b in zip(stacked, held, strict=True)]
            parts.append(element("path", element("title", name), class_=f"kind{KINDS.index(name)}",
                                 d=_area(stacked, above, edges, y)))
            stacked = above
    parts.append(element("path", class_="outline", d=_line(stacked, edges, y)))
    if limit and limit <= top * 1.06:
        parts += [element("line", class_="limit", x1=LEFT, x2=WIDTH, y1=y(limit), y2=y(limit)),
                  element("text", f"{human(limit)} per device", class_="limit", x=WIDTH - 4, y=y(limit) - 4,
                          text_anchor="end")]
    for i, id in enumerate(curve.events):
        parts.append(_event(curve, known[id], edges[i], edges[i + 1], stacked[2 * i + 1]))
        if id == panel.peak.event:
            middle = (edges[i] + edges[i + 1]) / 2
            parts.append(element("circle", class_="peak", cx=middle, cy=y(stacked[2 * i + 1]), r=3))
    return element("svg", *parts, class_="memory", view_box=f"0 0 {number(WIDTH)} {number(HEIGHT)}", role="group",
                   aria_label=title)


def _edges(curve: Curve, durations: Mapping[int, float]) -> list[float]:
    """Where each event begins, and the last one ends: as wide as it is long, and wide enough to be seen."""
    seconds = [durations.get(e, 0.0) for e in curve.events]
    least = (sum(seconds) or 1.0) * SEEN
    wide = [max(s, least) for s in seconds]
    found, unit = [LEFT], (WIDTH - LEFT) / (sum(wide) or 1.0)
    for w in wide:
        found.append(found[-1] + w * unit)
    return found


def _moments(curve: Curve, name: str) -> list[float]:
    """Bytes of one kind on the device before, while and after each event."""
    changes = [0] * (2 * len(curve.events) + 2)
    for h in curve.holdings:
        if not h.host and category(h.what) == name:
            changes[h.start] += h.bytes
            changes[h.stop + 1] -= h.bytes
    found, at = [], 0.0
    for change in changes[:-1]:
        at += change
        found.append(at)
    return found


def _corners(values: Sequence[float], edges: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of a curve of steps: what is held while an event runs, from its begin to its end."""
    return [(x, values[2 * i + 1]) for i in range(len(edges) - 1) for x in (edges[i], edges[i + 1])]


def _area(lower: Sequence[float], upper: Sequence[float], edges: Sequence[float], y: Scale) -> str:
    above, below = _slim(_corners(upper, edges)), _slim(_corners(lower, edges))
    return "M" + "L".join(f"{number(x, 1)} {number(y(v), 1)}" for x, v in (*above, *reversed(below))) + "Z"


def _line(values: Sequence[float], edges: Sequence[float], y: Scale) -> str:
    return "M" + "L".join(f"{number(x, 1)} {number(y(v), 1)}" for x, v in _slim(_corners(values, edges)))


def _slim(corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the corners on a level line."""
    return [c for i, c in enumerate(corners)
            if i in (0, len(corners) - 1) or not corners[i - 1][1] == c[1] == corners[i + 1][1]]


def _axis(top: int, y: Scale) -> list[Markup]:
    """Round numbers of bytes."""
    unit = 1
    while unit * 1024 <= top:
        unit *= 1024
    step: float = next((s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500) if top / unit / s <= 4), 1000) * unit
    if top < 2 * unit:
        step = unit / 2
    found, at = [], 0.0
    while at <= top:
        found += [element("line", class_="grid", x1=LEFT, x2=WIDTH, y1=y(at), y2=y(at)),
                  element("text", human(int(at)).replace(".0 ", " ") if at else "0", class_="tick", x=LEFT - 6,
                          y=y(at) + 3.5, text_anchor="end")]
        at += step
    return found


def _event(curve: Curve, event: Event, left: float, right: float, size: float) -> Markup:
    call, name = isinstance(event, ModelCall), describe_event(event).title
    holders = ", ".join(f"{what} {human(n)}" for what, n in during(curve, event.id)[:3])
    inside = [element("title", f"{name}: {human(int(size))}" + (f" ({holders})" if holders else "")),
              element("rect", class_="moment call" if call else "moment", x=left, y=TOP, width=right - left,
                      height=HEIGHT - BOTTOM - TOP)]
    if call and right - left >= LETTER * max(map(len, name.split(".", 1))):
        middle = (left + right) / 2
        inside += [element("text", part, class_="who", x=middle, y=HEIGHT - BOTTOM + 13 + 11 * i, text_anchor="middle")
                   for i, part in enumerate(name.split(".", 1))]
    return element("a", *inside, href=f"#e{event.id}", data_event=event.id, tabindex=-1)

