"""Where the lines of a run's metrics go besides `metrics.jsonl`: TensorBoard and Weights & Biases; `trackers.py` has
others.

In: a step and its numbers, and its samples. Out: files (and, with `--wandb online`, messages to their service). All are
optional packages: RL0782 one is asked for and not installed, RL0787 it refuses to begin. A run that resumes continues
the same curves.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Any, Protocol

from rldsl.diag import fail
from rldsl.plan.arrays import Histogram
from rldsl.runtime.files import written

TENSORBOARD, WANDB = "tensorboard", "wandb"


# "samples/NAME" or "tables/NAME" -> lines, as in the file OUT/samples/NAME.jsonl
Tables = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class RunLabels:
    """How a tracker calls a run."""

    project: str                     # what it belongs to
    name: str                        # the run itself
    tags: tuple[str, ...] = ()       # words to find it by
    config: Mapping[str, Any] | None = None  # parameters of the program


class MetricWriter(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def write_tables(self, step: int, tables: Tables) -> None:
        """Called before `write` of the same step."""

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Called before `write` of the same step."""

    def close(self, ok: bool) -> None:
        """ok: the run was not ended by an error."""


def import_optional(module: str, option: str, extra: str) -> ModuleType:
    """An optional package. RL0782: not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise fail("RL0782", f"{option} needs the package {error.name or module}, which is not installed",
                   place=option, help=f"pip install 'rldsl[{extra}]'" if extra else f"pip install {module}") from None


def check_packages(tensorboard: bool, wandb: str, trackers: Sequence[str] = ()) -> None:
    """Check that the packages of what is asked for are installed. trackers: as for `trackers.Accelerate`."""
    for name in trackers:
        import_optional("accelerate", f"--report-to {name}", "trackers")
        import_optional(name, f"--report-to {name}", "")
    if tensorboard:
        import_optional("tensorboard", "--tensorboard", TENSORBOARD)
    if wandb:
        import_optional("wandb", "--wandb", WANDB)


class TensorBoard:
    """Event files under OUT/tensorboard, which `tensorboard --logdir OUT` shows."""

    def __init__(self, out: Path, step: int):
        """step: the first that will be written; what an earlier start wrote from that step on is dropped."""
        import_optional("tensorboard", "--tensorboard", TENSORBOARD)
        made = import_optional("torch.utils.tensorboard", "--tensorboard", TENSORBOARD)
        self._folder = out / TENSORBOARD
        with written(self._folder):
            self._writer = made.SummaryWriter(str(self._folder), purge_step=step if step > 1 else None)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        with written(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def write_tables(self, step: int, tables: Tables) -> None:
        with written(self._folder):
            for name, lines in tables.items():
                columns, rows = table(lines)
                text = [columns, ["---"] * len(columns), *([_cell(x) for x in row] for row in rows)]
                self._writer.add_text(name, "\n".join(f"| {' | '.join(row)} |" for row in text), step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """TensorBoard stores sums, too, which it does not show: those of elements in the middle of their bins."""
        with written(self._folder):
            for name, h in histograms.items():
                edges = h.edges()
                middle = [(a + b) / 2 for a, b in pairwise(edges)]
                self._writer.add_histogram_raw(
                    name, h.low, h.high, sum(h.counts), sum(x * n for x, n in zip(middle, h.counts, strict=True)),
                    sum(x * x * n for x, n in zip(middle, h.counts, strict=True)), edges[1:], list(h.counts), step)

    def close(self, ok: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; its files lie under OUT/wandb, from where `wandb sync` sends offline runs."""

    def __init__(self, out: Path, step: int, mode: str, labels: RunLabels):
        """step: the first that will be written."""
        self._wandb = wandb = import_optional("wandb", "--wandb", WANDB)
        (out / WANDB).mkdir(parents=True, exist_ok=True)
        id = run_id(out / WANDB / "id", again=step > 1)
        try:
            self._run = wandb.init(project=labels.project, name=labels.name, dir=str(out), mode=mode, id=id,
                                   tags=list(labels.tags) or None, resume="allow", config=dict(labels.config or {}),
                                   settings=wandb.Settings(console="off", silent=True))
        except Exception as error:  # whatever a library of this size brings: no network, no key, a full disk
            message = " ".join(str(error).split())[:300] or type(error).__name__
            raise fail("RL0787", f"Weights & Biases cannot start: {message}", place=f"--wandb {mode}",
                       help="`--wandb offline` needs no network access and no API key") from None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def write_tables(self, step: int, tables: Tables) -> None:
        for name, lines in tables.items():
            columns, rows = table(lines)
            self._run.log({name: self._wandb.Table(columns=columns, data=rows)}, step=step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._run.log({name: self._wandb.Histogram(np_histogram=(list(h.counts), h.edges()))
                       for name, h in histograms.items()}, step=step)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


def table(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of samples; what is neither a text nor a number is JSON, so that each column has one type."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    return columns, [[_plain(line.get(name)) for name in columns] for line in lines]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) or value is None else json.dumps(value, ensure_ascii=False)


def _cell(value: Any) -> str:
    """As Markdown has it in a row of a table."""
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def run_id(file: Path, again: bool) -> str:
    """The id of this run at the service: the same when the run is resumed."""
    with written(file):
        if not (again and file.exists()):
            file.write_text(token_hex(4))
        return file.read_text().strip()
