"""The histograms of a run over its steps: one column a step, darker where more elements are.

In: the lines of `histograms.jsonl`. Out: one picture for each histogram, as SVG. Columns share one vertical axis, on
which each lies where its own range is, so that a distribution that moves is seen to move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rldsl.pages.markup import element, number

COLUMNS = 60  # steps shown, with the first and the last
WIDTH, HEIGHT = 320.0, 170.0  # of the drawing
LEFT, BOTTOM = 48.0, 18.0  # for the numbers of the axes


@dataclass(frozen=True, slots=True)
class Distribution:
    """The panel of a histogram."""

    name: str  # of the metric
    last: str  # of the last step: how many elements, and from where to where
    picture: Markup  # its steps


def distributions(lines: Sequence[Mapping[str, Any]]) -> tuple[Distribution, ...]:
    names = dict.fromkeys(name for line in lines for name in line if name != "step")
    return tuple(_distribution(name, [(int(line["step"]), line[name]) for line in lines if name in line])
                 for name in names)


def _distribution(name: str, steps: Sequence[tuple[int, Mapping[str, Any]]]) -> Distribution:
    shown = [steps[i] for i in _evenly(len(steps), COLUMNS)]
    low, high = min(h["low"] for _, h in shown), max(h["high"] for _, h in shown)
    wide = (WIDTH - LEFT) / len(shown)
    columns = [_column(step, h, LEFT + i * wide, wide, low, high) for i, (step, h) in enumerate(shown)]
    texts = [element("text", _short(high), x=LEFT - 6, y=10, text_anchor="end"),
             element("text", _short(low), x=LEFT - 6, y=HEIGHT - BOTTOM, text_anchor="end"),
             element("text", f"step {shown[0][0]}", x=LEFT, y=HEIGHT - 4)]
    if len(shown) > 1:
        texts.append(element("text", str(shown[-1][0]), x=WIDTH, y=HEIGHT - 4, text_anchor="end"))
    about = f"{name}: {len(steps)} steps; the last: {_about(steps[-1][1])}"
    picture = element("svg", element("title", about), *columns, *texts, class_="spread", role="img", aria_label=about,
                      view_box=f"0 0 {number(WIDTH)} {number(HEIGHT)}")
    return Distribution(name, _about(steps[-1][1]), picture)


def _column(step: int, h: Mapping[str, Any], x: float, wide: float, low: float, high: float) -> Markup:
    """The bins of a step; the fullest is the darkest."""
    counts, tall = h["counts"], HEIGHT - BOTTOM
    most, scale = max(counts, default=0) or 1, (high - low) or 1.0
    each = (h["high"] - h["low"]) / len(counts) / scale * tall
    bottom = tall - (h["low"] - low) / scale * tall
    bars = [element("rect", x=x, y=bottom - (i + 1) * each, width=wide, height=each,
                    fill_opacity=round(0.12 + 0.88 * n / most, 3)) for i, n in enumerate(counts) if n]
    return element("g", element("title", f"step {step}: {_about(h)}"), *bars)


def _about(h: Mapping[str, Any]) -> str:
    found = f"{sum(h['counts']) + h['below'] + h['above']:,} elements, {_short(h['low'])} to {_short(h['high'])}"
    outside = [f"{h[k]:,} {word}" for k, word in (("below", "below"), ("above", "above"), ("nan", "NaN")) if h[k]]
    return ", ".join([found, *outside])


def _short(x: float) -> str:
    return f"{x:.3g}" if math.isfinite(x) else "not finite"


def _evenly(count: int, most: int) -> list[int]:
    """At most `most` of the first `count` numbers, evenly, with the first and the last."""
    return list(range(count)) if count <= most else sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
