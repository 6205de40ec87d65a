"""A run seen on a terminal: progress with ETA, time of each phase, a curve of the reward, the latest numbers.

In: the lines of metrics as they come, and what this rank is doing. Out: a view that is redrawn in place. Nothing
else of the runtime imports rich, and only a rank that logs to a terminal does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rldsl.plan.arrays import Histogram
from rldsl.runtime.metrics.names import computed, display_order
from rldsl.runtime.metrics.tee import Tee

BARS = "▁▂▃▄▅▆▇█"
COLORS = {"generate": "cyan", "infer": "blue", "train": "magenta", "rest": "bright_black"}
CURVE_POINTS = 48
MAX_NUMBERS = 8  # that are shown below the curve
MAX_HISTOGRAMS = 4  # below the numbers


@dataclass(frozen=True, slots=True)
class ViewState:
    """Everything that the view shows."""

    name: str                                             # of the run
    steps: int                                            # of the whole run
    begun: int = 0                                        # step at which this start of the run began
    step: int = 0                                         # the last step that has ended
    seconds: float = 0.0                                  # since this start of the run began
    first_end: float = 0.0                                # `seconds` when the first step of this start ended
    last_end: float = 0.0                                 # `seconds` when the last step so far ended
    doing: str = ""                                       # what this rank is doing, in words
    line: Mapping[str, float] | None = None               # the latest line of metrics; None before the first
    history: Mapping[str, Sequence[float]] | None = None  # name -> values, oldest first
    histograms: Mapping[str, Histogram] | None = None     # the latest

    def with_line(self, line: Mapping[str, float]) -> ViewState:
        history = {name: [*(self.history or {}).get(name, ()), line[name]][-CURVE_POINTS:] for name in computed(line)}
        first = self.first_end if self.step > self.begun else self.seconds
        return replace(self, step=int(line["step"]), line=dict(line), history=history, first_end=first,
                       last_end=self.seconds)


def eta(seen: ViewState) -> float | None:
    """Seconds to the end, when the steps to come take as long as those of this start did. The first one does not count:
    it loads weights and warms up. None: too early to say."""
    left, timed = seen.steps - seen.step, seen.step - seen.begun - 1
    if timed < 1:
        return 0.0 if left == 0 else None
    each = (seen.last_end - seen.first_end) / timed
    return max(0.0, each * left - (seen.seconds - seen.last_end)) if left else 0.0


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float]) -> str:
    """One character per value, lowest to highest; what is not a number is a gap."""
    real = [v for v in values if abs(v) < float("inf")]
    if not real:
        return " " * len(values)
    low, high = min(real), max(real)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if abs(v) < float("inf") else " " for v in values)


def shares(line: Mapping[str, float], width: int) -> list[tuple[str, int]]:
    """Phase -> characters of a bar of `width`, which they fill."""
    times = {name.removeprefix("time/"): s for name, s in line.items() if name.startswith("time/")}
    total = sum(times.values())
    if total <= 0:
        return []
    edges, at = [], 0.0
    for s in times.values():
        at += s
        edges.append(round(at / total * width))
    return [(phase, end - start) for phase, start, end in zip(times, [0, *edges[:-1]], edges, strict=True)]


def picture(seen: ViewState, width: int = 80) -> RenderableType:
    """The live view as rich draws it. width: columns of the terminal."""
    rate = seen.line.get("tokens_per_second") if seen.line else None
    head = Table.grid(padding=(0, 1))
    head.add_row(Text(seen.name, "bold"), ProgressBar(total=seen.steps, completed=seen.step, width=max(10, width - 62)),
                 Text(f"step {seen.step}/{seen.steps}"), Text(clock(seen.seconds), "dim"),
                 Text(f"ETA {clock(eta(seen))}", "green"), Text(f"{rate:,.0f} tokens/s" if rate else "", "dim"))
    parts: list[RenderableType] = [head]
    if seen.line:
        parts += [_phases(seen.line, width), *_numbers(seen, width)]
    parts += [_distributions(seen.histograms, width)] if seen.histograms else []
    if seen.doing:
        parts.append(Text(f"now: {seen.doing}", "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _phases(line: Mapping[str, float], width: int) -> RenderableType:
    bar, legend = Text(), Text()
    for phase, cells in shares(line, max(10, width - 2)):
        color = COLORS.get(phase, "white")
        bar.append("█" * cells, color)
        legend.append("■ ", color).append(f"{phase} {line[f'time/{phase}']:.2f} s  ")
    return Group(bar, legend)


def _numbers(seen: ViewState, width: int) -> list[RenderableType]:
    line = seen.line or {}
    names = sorted(computed(line), key=display_order)[:MAX_NUMBERS]
    table = Table.grid(padding=(0, 2))
    for i, name in enumerate(names):
        values = (seen.history or {}).get(name, ())
        room = max(8, width - 44)
        curve = Text(sparkline(values[-room:]), "yellow") if i < 2 else Text("")
        table.add_row(Text(name, no_wrap=True), Text(f"{line[name]:.4g}", justify="right"), curve)
    return [table]


def _distributions(histograms: Mapping[str, Histogram], width: int) -> RenderableType:
    """One line each: the counts of the bins as bars, between the ends of the range."""
    table = Table.grid(padding=(0, 2))
    for name, h in list(histograms.items())[:MAX_HISTOGRAMS]:
        bars = sparkline(_merged(h.counts, max(8, width - 44)))
        table.add_row(Text(name, no_wrap=True), Text(f"{h.low:.3g}", justify="right"), Text(bars, "yellow"),
                      Text(f"{h.high:.3g}"))
    return table


def _merged(counts: Sequence[int], most: int) -> list[int]:
    """The counts, those of neighboring bins added up so that there are `most` at most."""
    size = -(-len(counts) // most)
    return [sum(counts[i : i + size]) for i in range(0, len(counts), size)]


def usable(stream: TextIO) -> bool:
    """Whether a terminal supports a view that is redrawn in place."""
    return not Console(file=stream).is_dumb_terminal


class LiveView:
    """The live view of one rank."""

    def __init__(self, stream: TextIO, name: str, steps: int, begun: int, now: Callable[[], float] = time.monotonic):
        """stream: the terminal. now: seconds."""
        self._screen = stream.screen if isinstance(stream, Tee) else stream
        self._stream, self._now, self._since = stream, now, now()
        self._seen = ViewState(name, steps, begun, begun)
        self.console = Console(file=self._screen)
        self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4, redirect_stdout=False,
                          redirect_stderr=False)
        self._live.start()
        self.console.show_cursor(True)  # a rank may end at any moment, and must not leave a terminal without one
        self._before = sys.stderr
        proxy: Any = FileProxy(self.console, self._screen)  # what the rank says comes above the picture
        if isinstance(stream, Tee):
            stream.screen = proxy
        elif sys.stderr is stream:
            sys.stderr = proxy

    def _draw(self) -> RenderableType:
        return picture(replace(self._seen, seconds=self._now() - self._since), self.console.width)

    def doing(self, what: str) -> None:
        self._seen = replace(self._seen, doing=what)

    def line(self, line: Mapping[str, float], histograms: Mapping[str, Histogram] | None = None) -> None:
        """histograms: of the same step; without any, those of an earlier step stay."""
        self._seen = replace(self._seen, seconds=self._now() - self._since,
                             histograms=histograms or self._seen.histograms).with_line(line)

    def close(self) -> None:
        """Leave the last view on the terminal."""
        self._seen = replace(self._seen, doing="")
        self._live.stop()
        if isinstance(self._stream, Tee):
            self._stream.screen = self._screen
        else:
            sys.stderr = self._before
