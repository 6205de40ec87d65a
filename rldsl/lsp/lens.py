"""The text above a call: where it runs, how long it takes, how much memory a rank needs; above the flow, the step.

In: an analysis and a forecast, or None while there is none. Out: (span, text); `cost` alone for hovers.
"""

from __future__ import annotations

from rldsl.lsp.analysis import Analysis
from rldsl.lsp.facts import CallFact
from rldsl.lsp.forecast import Forecast
from rldsl.plan.notation import human, layout_text, seconds_text
from rldsl.source import Span
from rldsl.syntax import ast

BETWEEN = " · "


def lenses(analysis: Analysis, known: Forecast | None) -> list[tuple[Span, str]]:
    own = [c for c in analysis.facts.calls if c.span.file == analysis.source]
    found = [(c.span, BETWEEN.join([f"{c.name}: {layout_text(c.placement.layout, c.placement.mesh)}", *cost(c, known)]))
             for c in own]
    flow = next((i for i in analysis.file.items if isinstance(i, ast.Flow)), None)
    if flow is not None and known is not None and (text := step(known)):
        found.append((flow.name.span, text))
    return sorted(found, key=lambda x: x[0].start)


def cost(call: CallFact, known: Forecast | None) -> list[str]:
    """["72.9 s", "61.0 GiB per rank"], as far as it is known."""
    at = f"{call.span.line}:{call.span.column}"
    for found in known.calls if known is not None else ():
        if (found.at, found.name) == (at, call.name):
            time = [seconds_text(found.seconds)] if found.seconds >= 0 else []
            return [*time, _memory(found.bytes, known.memory if known else 0)]
    return []


def step(known: Forecast) -> str:
    """For the whole program: "a step: 116 s, 6,782 tokens/s on h100x64, sequences at full length · peak 61.0 GiB a
    rank"."""
    parts = []
    if known.seconds >= 0:
        parts.append(f"step: {seconds_text(known.seconds)}, {known.tokens_per_second:,.0f} tokens/s on "
                     f"{known.machine}, sequences at their maximum length")
    parts += [known.lag] if known.lag else []
    if known.calls:
        parts.append(f"peak {_memory(known.peak, known.memory)}")
    if known.why:
        parts.append(f"{'no time' if known.calls else 'no forecast'}: {known.why}")
    return BETWEEN.join(parts)


def _memory(bytes: int, room: int) -> str:
    return f"{human(bytes)} per rank" + (f", a device has {human(room)}" if 0 < room < bytes else "")
