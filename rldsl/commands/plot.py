"""`rlc plot`: the metrics of runs as small pictures next to each other, SVG or PNG.

In: directories of runs. Out: one file; several runs lie over each other in the same panels.
Errors: RL0782 matplotlib is not installed, RL0785 no run has such a metric, RL0786 another format than SVG or PNG.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rldsl.commands.runs import metrics
from rldsl.diag import fail
from rldsl.files import write
from rldsl.plan.metrics_file import Lines
from rldsl.runtime.metrics.names import computed, display_order

FORMATS = (".svg", ".png")
USUAL = ("reward", "score", "accuracy", "kl", "loss", "length", "length/response")  # by the end of the name
COLUMNS, MOST = 3, 12  # of panels; without --metric
WIDTH, HEIGHT = 4.2, 2.8  # inches of a panel


def plot(folders: Sequence[str], target: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Draw to `target`; the names of the metrics that were drawn. patterns: names, or with * and ?."""
    if Path(target).suffix.lower() not in FORMATS:
        raise fail("RL0786", f"{target}: the file extension must be .svg or .png", place=target,
                   help="use the extension .svg or .png")
    found = {name: metrics(Path(folder)) for name, folder in _names(folders).items()}
    names = choose(found, patterns)
    write(target, draw(found, names, Path(target).suffix.lower()[1:]))
    return names


def _names(folders: Sequence[str]) -> dict[str, str]:
    """What a legend calls each run: the last part of its path, or all of it where two share that."""
    each = list({os.path.realpath(folder): folder for folder in folders}.values())
    last = [os.path.basename(os.path.realpath(folder)) for folder in each]
    return {(name if last.count(name) == 1 else folder): folder for name, folder in zip(last, each, strict=True)}


def choose(found: Mapping[str, Lines], patterns: Sequence[str]) -> tuple[str, ...]:
    """The metrics to draw. Without patterns: rewards, KL, losses and lengths, or all that programs compute when there
    are none of these."""
    every = list(dict.fromkeys(name for lines in found.values() for line in lines for name in line if name != "step"))
    chosen: list[str] = []
    for pattern in patterns:
        fitting = [name for name in every if name == pattern] or [name for name in every if fnmatchcase(name, pattern)]
        if not fitting:
            near = get_close_matches(pattern, every, n=1)
            raise fail("RL0785", f"no run has a metric {pattern!r}", place="--metric",
                       help=f"did you mean {near[0]}?" if near else f"metrics of the runs: {', '.join(every[:12])}")
        chosen += fitting
    if patterns:
        return tuple(dict.fromkeys(chosen))
    usual = [name for name in every if any(name == end or name.endswith(f"/{end}") for end in USUAL)]
    return tuple(sorted(usual or computed(every), key=display_order)[:MOST]) or tuple(every[:MOST])


def draw(found: Mapping[str, Lines], names: Sequence[str], form: str) -> bytes:
    """The picture. form: "svg" or "png". The same metrics give the same bytes, and letters of an SVG stay text."""
    from io import BytesIO

    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise fail("RL0782", "`rlc plot` needs a package that is not installed: matplotlib", place="rlc plot",
                   help="pip install 'rldsl[plot]'") from None
    columns = min(COLUMNS, len(names))
    rows, out = math.ceil(len(names) / columns), BytesIO()
    with rc_context({"svg.hashsalt": "rldsl", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        for i, name in enumerate(names, 1):
            _panel(figure.add_subplot(rows, columns, i), found, name)
        if len(found) > 1:
            handles = {label: h for panel in figure.axes
                       for h, label in zip(*panel.get_legend_handles_labels(), strict=True)}
            figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(found)))
        figure.savefig(out, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _panel(panel: Any, found: Mapping[str, Lines], name: str) -> None:
    """One metric of every run that has it; each run keeps its color in all panels."""
    panel.set_title(name)
    panel.set_xlabel("step")
    panel.grid(alpha=0.3)
    for i, (run, lines) in enumerate(found.items()):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            panel.plot(*zip(*points, strict=True), color=f"C{i}", label=run, linewidth=1.2,
                       marker="." if len(points) < 30 else "")
