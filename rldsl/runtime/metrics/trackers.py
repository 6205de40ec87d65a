"""Trackers that the library `accelerate` knows: MLflow, trackio and Comet.

In: a step and its numbers, and its samples. Out: messages to the tracker, by the classes of `accelerate.tracking`.
Each tracker is a separate package; where it stores runs, and with which key, is set by its own variables, such as
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID and COMET_API_KEY. A run that resumes continues the same run of the tracker.
Errors: RL0782 a package is not installed, RL0787 the tracker refuses to begin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rldsl.diag import fail
from rldsl.plan.arrays import Histogram
from rldsl.runtime.files import written
from rldsl.runtime.metrics.writers import RunLabels, Tables, check_packages, run_id, table

EXTRA = "trackers"
IDS = "trackers"  # directory of the run, with the ids of its runs at trackers


class Accelerate:
    """A run of a tracker. After a first failure of the tracker, such as a lost network, a warning is printed and the
    run continues without it: its metrics are in `metrics.jsonl` anyway."""

    def __init__(self, name: str, out: Path, step: int, labels: RunLabels):
        """name: a key of `STARTS`. step: the first that will be written."""
        check_packages(False, "", (name,))
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # its log messages need one; the process group is there already
        self._name, self._failed = name, False
        file = out / IDS / name
        with written(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._tracker = STARTS[name](LOGGER_TYPE_TO_CLASS[name], labels, file, step > 1)
            self._tracker.main_process_only = False  # the rank that logs writes, whatever `accelerate` takes it for
            self._tracker.start()
            STARTED[name](self._tracker, labels, file)
            self._tracker.store_init_configuration(dict(labels.config or {}))
        except Exception as error:  # whatever a library of this size brings: no network, no key, a full disk
            message = " ".join(str(error).split())[:300] or type(error).__name__
            raise fail("RL0787", f"{name} cannot start: {message}", place=f"--report-to {name}",
                       help="its own documentation says where it stores runs, and which key it needs") from None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._try(lambda: self._tracker.log(dict(numbers), step=step))

    def write_tables(self, step: int, tables: Tables) -> None:
        self._try(lambda: TABLES[self._name](self._tracker, step, tables))

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._try(lambda: HISTOGRAMS[self._name](self._tracker, step, histograms))

    def close(self, ok: bool) -> None:
        self._try(self._tracker.finish)

    def _try(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:  # see the class
            self._failed = True
            message = " ".join(str(error).split())[:300] or type(error).__name__
            print(f"warning: {self._name} failed and gets no more metrics: {message}", file=sys.stderr, flush=True)


def _mlflow(kind: Any, labels: RunLabels, file: Path, again: bool) -> Any:
    return kind(labels.project, run_name=labels.name, tags=dict.fromkeys(labels.tags, "true") or None,
                run_id=file.read_text().strip() if again and file.exists() else None)


def _mlflow_started(tracker: Any, labels: RunLabels, file: Path) -> None:
    file.write_text(str(tracker.tracker.info.run_id))


def _mlflow_table(tracker: Any, step: int, tables: Tables) -> None:
    import mlflow

    for name, lines in tables.items():
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        mlflow.log_text(text, f"{name}/step-{step:06}.jsonl")


def _mlflow_histogram(tracker: Any, step: int, histograms: Mapping[str, Histogram]) -> None:
    import mlflow

    for name, h in histograms.items():
        mlflow.log_dict(asdict(h), f"histograms/{name}/step-{step:06}.json")


def _trackio(kind: Any, labels: RunLabels, file: Path, again: bool) -> Any:
    """It continues the run of the same name, so the name has a part that no other run has."""
    return kind(labels.project, name=f"{labels.name}-{run_id(file, again)}", resume="allow", embed=False)


def _trackio_started(tracker: Any, labels: RunLabels, file: Path) -> None:
    if labels.tags:  # it has no tags
        tracker.store_init_configuration({"tags": ", ".join(labels.tags)})


def _trackio_table(tracker: Any, step: int, tables: Tables) -> None:
    import pandas
    import trackio

    for name, lines in tables.items():
        columns, rows = table(lines)
        tracker.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)


def _trackio_histogram(tracker: Any, step: int, histograms: Mapping[str, Histogram]) -> None:
    import trackio

    tracker.log({name: trackio.Histogram(np_histogram=(list(h.counts), h.edges())) for name, h in histograms.items()},
                step=step)


def _comet(kind: Any, labels: RunLabels, file: Path, again: bool) -> Any:
    key = run_id(file, again)  # 32 to 50 letters and digits
    return kind(labels.project, experiment_key=(key * 8)[:32], mode="get_or_create")


def _comet_started(tracker: Any, labels: RunLabels, file: Path) -> None:
    tracker.tracker.set_name(labels.name)
    if labels.tags:
        tracker.tracker.add_tags(list(labels.tags))


def _comet_table(tracker: Any, step: int, tables: Tables) -> None:
    for name, lines in tables.items():
        columns, rows = table(lines)
        tracker.tracker.log_table(f"{name.replace('/', '-')}-{step:06}.csv", tabular_data=rows, headers=columns)


def _comet_histogram(tracker: Any, step: int, histograms: Mapping[str, Histogram]) -> None:
    """As files: its own histograms are made from the elements."""
    for name, h in histograms.items():
        tracker.tracker.log_asset_data(asdict(h), name=f"histogram-{name}-{step:06}.json", step=step)


# tracker -> makes an object of accelerate's class (class, labels, file of its id, whether the run resumes)
STARTS: Mapping[str, Callable[[Any, RunLabels, Path, bool], Any]] = {
    "mlflow": _mlflow, "trackio": _trackio, "comet_ml": _comet}
# what is done once it has started
STARTED: Mapping[str, Callable[[Any, RunLabels, Path], None]] = {
    "mlflow": _mlflow_started, "trackio": _trackio_started, "comet_ml": _comet_started}
# how it gets samples and tables
TABLES: Mapping[str, Callable[[Any, int, Tables], None]] = {
    "mlflow": _mlflow_table, "trackio": _trackio_table, "comet_ml": _comet_table}
# how it gets histograms
HISTOGRAMS: Mapping[str, Callable[[Any, int, Mapping[str, Histogram]], None]] = {
    "mlflow": _mlflow_histogram, "trackio": _trackio_histogram, "comet_ml": _comet_histogram}
