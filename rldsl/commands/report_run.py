"""`rlc report DIR`: a run as a page, written again and again during the run.

In: the directory of a run, and what `rlc report` takes besides: a cluster, a recorded timeline, another run. Out: the
text of one HTML file. Errors: RL0783 no run, RL0784 damaged metrics or samples, and those of `rlc report`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rldsl.commands.diff_runs import diff_runs
from rldsl.commands.runs import metrics
from rldsl.diag import Failure, fail
from rldsl.files import read_bytes
from rldsl.pages import Given, RunGiven, page
from rldsl.pages.recorded import read as read_trace
from rldsl.pages.run import Compared
from rldsl.plan.metrics_file import HISTOGRAMS, METRICS, SAMPLES, STEP, TABLES, Lines, histogram_lines
from rldsl.plan.metrics_file import read as read_metrics
from rldsl.python.compare import compared as plans_compared
from rldsl.python.entry import load
from rldsl.python.machines import assumed, machine_of
from rldsl.python.plan import Plan, trace_text
from rldsl.runtime.metrics.names import display_order
from rldsl.runtime.metrics.run_record import PLAN, RECORD, RUNNING, read_record
from rldsl.simulate import simulate

PAGE, TRACE = "report.html", "trace.json"  # in the directory of a run; the second is read if it is there
SETTINGS = ("program", "flow", "seed", "steps", "world", "devices", "versions", "command")  # compared one by one


def is_run(path: str) -> bool:
    """Whether `rlc report` was given a run, and not a plan."""
    return os.path.isdir(path)


@dataclass(frozen=True, slots=True)
class RunPage:
    """What does not change during a run."""

    folder: Path           # of the run
    plan: Given            # its plan, simulated
    against: Path | None   # the run that it is compared with

    def html(self, refresh: int = 0) -> str:
        """The page as the files are now. refresh: seconds after which a browser loads it again, while the run runs."""
        record = _record(self.folder)
        lines = _lines(self.folder)
        other = _lines(self.against) if self.against is not None else []
        names = dict.fromkeys(name for line in [*lines, *other] for name in line if name != STEP)
        return page(self.plan, RunGiven(
            str(self.folder), record, lines, tuple(sorted(names, key=display_order)), _samples(self.folder),
            _histograms(self.folder),
            _compared(self.folder, self.against, record, lines) if self.against is not None else None,
            refresh if record["state"] == RUNNING else 0))

    def running(self) -> bool:
        return bool(_record(self.folder)["state"] == RUNNING)

    def stamp(self) -> tuple[object, ...]:
        """Changes when the page would."""
        files = [self.folder / METRICS, self.folder / HISTOGRAMS, self.folder / RECORD, *_sequence_files(self.folder)]
        return tuple((str(f), s.st_size, s.st_mtime_ns) for f in files if f.exists() and (s := f.stat()))


def run_page(folder: str, cluster: str | None = None, trace: str | None = None, against: str | None = None) -> RunPage:
    """Read and simulate the run's plan. cluster: None takes as many nodes of a known kind as the plan needs. trace:
    None takes OUT/trace.json, if there is one of this plan."""
    out = Path(folder)
    _record(out)
    if against is not None:
        _record(Path(against))
    plan = load(str(out / PLAN))
    record = plan.record
    machine = assumed(plan.ranks, record.header.devices_per_node) if cluster is None else machine_of(cluster)
    recorded = read_trace(trace_text(trace), trace, record) if trace is not None else None
    if trace is None and (out / TRACE).is_file():
        with suppress(Failure):  # of an earlier run in this directory: nobody asked for it
            recorded = read_trace(trace_text(str(out / TRACE)), TRACE, record)
    given = Given(record, plan.id, plan.compiled.proof, plan.compiled.curves, machine, cluster is None,
                  simulate(record, machine), recorded=recorded, sources=plan.sources)
    return RunPage(out, given, Path(against) if against is not None else None)


def watch(made: RunPage, seconds: int, write: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
          ) -> None:
    """Write the page again whenever the run has made progress, until it ends. The last page loads itself no more, also
    after Ctrl-C."""
    before: tuple[object, ...] | None = None
    try:
        while made.running():
            if (now := made.stamp()) != before:
                write(made.html(seconds))
                before = now
            sleep(seconds)
    finally:
        write(made.html())


def _record(folder: Path) -> dict[str, Any]:
    found = read_record(folder)
    if found is None:
        metrics(folder)  # says what is there instead
        raise fail("RL0783", "no run in this directory", place=str(folder / RECORD),
                   help="`rlc runs DIR` lists the runs below a directory")
    return found


def _lines(folder: Path) -> Lines:
    """[] before the first step."""
    try:
        return read_metrics(folder / METRICS)
    except FileNotFoundError:
        return []


def _samples(folder: Path) -> dict[str, list[dict[str, Any]]] | None:
    """The recorded sequences of each generated batch and table; a last line that is not whole is being written."""
    files = {("table " if file.parent.name == TABLES else "") + file.stem: file for file in _sequence_files(folder)}
    found = {name: [_sample(file, n, text) for n, text in enumerate(read_bytes(str(file)).split(b"\n")[:-1], 1)]
             for name, file in files.items()}
    return found or None


def _sequence_files(folder: Path) -> list[Path]:
    """Samples and tables."""
    return [file for name in (SAMPLES, TABLES) for file in sorted((folder / name).glob("*.jsonl"))]


def _histograms(folder: Path) -> list[dict[str, Any]]:
    """[] of a run without; a last line that is not whole is being written."""
    try:
        return histogram_lines(folder / HISTOGRAMS)
    except FileNotFoundError:
        return []


def _sample(file: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
        int(line["step"]), int(line["row"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise fail("RL0784", "this line is not a sampled sequence", place=f"{file}:{number}",
                   help="the file is damaged; delete it to see the page without samples") from None
    found: dict[str, Any] = line
    return found


def _compared(one: Path, two: Path, record: dict[str, Any], lines: Lines) -> Compared:
    other, plans = _record(two), (load(str(one / PLAN)), load(str(two / PLAN)))
    same = plans[0].id == plans[1].id
    try:
        first = diff_runs(str(one), str(two)).text((str(one), str(two)))
    except Failure as failure:  # one of them has no step yet, or they have none in common: the rest of the page holds
        first = "\n".join(d.title for d in failure.diagnostics)
    changes = "" if same else _changes(*plans)
    return Compared(str(two), _lines(two), same, tuple(_settings(record, other)), changes, first)


def _changes(one: Plan, two: Plan) -> str:
    return plans_compared(one.record, two.record, (one.name, two.name), (one.id, two.id)).text()


def _settings(one: dict[str, Any], two: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What differs in how both were started."""
    params = one.get("params", {}), two.get("params", {})
    for name in dict.fromkeys([*params[0], *params[1]]):
        if params[0].get(name) != params[1].get(name):
            before, after = (str(p[name]) if name in p else "not set" for p in params)
            yield f"param {name}", before, after
    for name in SETTINGS:
        if one.get(name) != two.get(name):
            yield name, _text(one.get(name)), _text(two.get(name))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
