"""Views of a plan: its dataflow, memory, report, simulated step.

In: records of a plan, and what was computed of it. Out: values with numbers to use, `text()` to print, and pictures or
HTML for a notebook.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rldsl.clusters import Cluster
from rldsl.files import write
from rldsl.memory.curve import Curve, Peak, left_out, peak, peaks
from rldsl.plan.model import Plan as Record
from rldsl.plan.notation import human
from rldsl.python.errors import ELSEWHERE, reports_failures
from rldsl.python.html import frame, table, terminal
from rldsl.simulate import Lengths, Timeline
from rldsl.simulate.summary import OtherLag

HEIGHT = 640  # pixels of a page inside a notebook


@dataclass(frozen=True, slots=True, repr=False)
class Graph:
    """The dataflow of a step: a node for each call, computation and movement."""

    plan: Record  # the plan as records

    @property
    def svg(self) -> str:
        """The picture as one SVG document."""
        from rldsl.pages import graph_svg

        return graph_svg(self.plan)

    @reports_failures
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture. Raises RL0094."""
        write(os.fspath(path), self.svg.encode(), ELSEWHERE)
        return Path(path)

    def __repr__(self) -> str:
        return f"<rldsl.Graph of {self.plan.header.program}>"

    def _repr_svg_(self) -> str:
        return self.svg


@dataclass(frozen=True, slots=True, repr=False)
class Memory:
    """What ranks hold on their devices over a step."""

    plan: Record               # the plan as records
    curves: tuple[Curve, ...]  # one for each set of ranks that hold the same

    @property
    def peaks(self) -> dict[int, Peak]:
        """Rank -> its most bytes, while which event, and who holds them."""
        return peaks(self.curves)

    @property
    def bytes(self) -> int:
        """The largest peak of a rank."""
        return max(p.bytes for p in self.peaks.values())

    def text(self) -> str:
        """A line for each set of ranks that hold the same."""
        rows = [_HEAD, *self._rows()]
        wide = [max(len(r[i]) for r in rows) for i in range(len(_HEAD))]
        lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows]
        return "\n".join((*lines, *left_out(self.plan)))

    def _rows(self) -> list[tuple[str, ...]]:
        from rldsl.plan.notation import ranks_text
        from rldsl.plan.projection import event_paths
        from rldsl.plan.visible_plan import visible_plan

        known = {e.id: e.display_name for e, _ in event_paths(visible_plan(self.plan))}
        found = [(tuple(r for a, b in c.ranks for r in range(a, b)), peak(c)) for c in self.curves]
        return [(ranks_text(ranks), human(p.bytes), known.get(p.event, ""),
                 ", ".join(f"{what} {human(size)}" for what, size in p.holders[:3])) for ranks, p in found]

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table(_HEAD, self._rows())


_HEAD = ("ranks", "peak", "while", "memory at the peak")


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A page for a browser that needs no other file."""

    html: str     # the page
    program: str  # name of the program

    @reports_failures
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page. Raises RL0094."""
        write(os.fspath(path), self.html.encode(), ELSEWHERE)
        return Path(path)

    def __repr__(self) -> str:
        return f"<rldsl.Report on {self.program}: {human(len(self.html.encode()))}>"

    def _repr_html_(self) -> str:
        return frame(self.html, f"Plan of {self.program}", HEIGHT)


@dataclass(frozen=True, slots=True, repr=False)
class Simulation:
    """A steady step of a plan on a cluster."""

    plan: Record                                       # the plan as records
    timeline: Timeline                                 # every class of ranks in every event, and the critical path
    cluster: Cluster                                   # the machines
    lengths: Lengths = field(default_factory=Lengths)  # the assumed lengths of sequences
    name: str = ""                                     # of the plan, for people
    other: OtherLag | None = None                      # what another lag would change; None: unknown
    durations: Mapping[str, float] = field(default_factory=dict)  # seconds of calls that were given, not predicted
    peak_bytes: int = 0                                # that the fullest rank needs; 0: unknown

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.timeline.seconds

    @property
    def average(self) -> float:
        """Seconds of a step, on average: with what runs in every K-th step only."""
        return self.timeline.average

    @property
    def tokens_per_second(self) -> float:
        """Prompt and response tokens of a step, divided by its seconds."""
        return self.timeline.tokens_per_second

    @property
    def idle(self) -> dict[str, float]:
        """Mesh id -> share of the step in which its ranks do nothing."""
        return dict(self.timeline.idle)

    def text(self) -> str:
        """What `rlc sim` prints."""
        from rldsl.simulate.summary import format_timeline

        return format_timeline(self.plan, self.timeline, self.cluster, self.lengths, Path(self.name).name,
                               self.other, tuple(self.durations), self.peak_bytes)

    def json(self) -> str:
        """What `rlc sim --json` prints; docs/simulate.md describes it."""
        from rldsl.simulate.summary import to_json

        return to_json(self.plan, self.timeline, self.cluster, self.other, self.durations, self.peak_bytes)

    @reports_failures
    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write the step as a Chrome trace (Perfetto, chrome://tracing). Raises RL0094."""
        from rldsl.simulate.trace import chrome

        write(os.fspath(path), chrome(self.plan, self.timeline).encode(), ELSEWHERE)
        return Path(path)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return terminal(self.text())
