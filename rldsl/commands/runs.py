"""`rlc runs`: what runs there are below a directory, and how each goes. `rlc plot` reads their metrics here too.

In: directories. Out: a table as text; the metrics of a run. Errors: RL0783 no run, RL0784 metrics that cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rldsl.diag import Failure, fail
from rldsl.plan.disk_paths import shown
from rldsl.plan.metrics_file import METRICS, Lines, last, read
from rldsl.runtime.metrics.names import computed, display_order
from rldsl.runtime.metrics.run_record import RECORD, runs


def listing(folder: str) -> str:
    """A table of the runs below `folder`, the newest first. RL0783: there is no such directory."""
    if not os.path.isdir(folder):
        raise fail("RL0783", f"no such directory: {folder}", place=folder,
                   help="`rlc run --out DIR` creates one for a run")
    found = list(runs(Path(folder)))
    if not found:
        return f"no runs below {folder}"
    rows = [("name", "program", "state", "step", "last", "started"), *(_row(Path(folder), *run) for run in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def records(folder: str) -> list[dict[str, Any]]:
    """The runs below `folder` as `run.json` describes them, with their directories. RL0783: there is no such
    directory."""
    if not os.path.isdir(folder):
        raise fail("RL0783", f"no such directory: {folder}", place=folder,
                   help="`rlc run --out DIR` creates one for a run")
    return [{"directory": str(out), **held} for out, held in runs(Path(folder))]


def _row(folder: Path, out: Path, held: dict[str, Any]) -> tuple[str, ...]:
    try:
        line = last(out / METRICS)
    except (Failure, FileNotFoundError):  # the list of runs is no place to learn that one of them is damaged
        line = {}
    names = sorted(computed(line), key=display_order)
    name = str(out.relative_to(folder)) if out != folder else out.name
    done = f"{line.get('step', held.get('step', 0))}/{held.get('steps', '?')}"
    return (name, shown(str(held.get("program", ""))), str(held["state"]), done,
            f"{names[0]} {line[names[0]]:.4g}" if names else "",
            shown(str(held.get("started", ""))[:16]).replace("T", " "))


def metrics(out: Path) -> Lines:
    """The lines of a run, one a step. A last one that is not whole is left out: the run may be writing it."""
    file = out / METRICS
    if not os.path.isdir(out):
        raise fail("RL0783", f"no such run: {out}", place=str(out), help=_near(out))
    try:
        found = read(file)
    except FileNotFoundError:
        if not (out / RECORD).is_file():
            raise fail("RL0783", "no run in this directory", place=str(file), help=_inside(out)) from None
        found = []
    if not found:
        raise fail("RL0784", "this run has no metrics yet", place=str(file),
                   help="they are written at the end of each step")
    return found


def _near(out: Path) -> str:
    names = [p.name for p in out.parent.iterdir() if p.is_dir()] if out.parent.is_dir() else []
    near = get_close_matches(out.name, names, n=1)
    return f"did you mean {out.parent / near[0]}?" if near else "`rlc runs DIR` lists the runs below a directory"


def _inside(out: Path) -> str:
    inside: Sequence[str] = [str(path) for path, _ in runs(out)]
    if inside:
        return f"runs in this directory: {', '.join(inside[:4])}"
    return "`rlc runs DIR` lists the runs below a directory"
