"""A run as a value of Python: its metrics, samples, plan and models.

In: a directory of a run. Out: `Run`, which reads the files of the run on access. The run may still be running.
Errors: RL0097 a package that is missing, RL0783 no run, RL0784 damaged metrics, RL0798 no saved model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rldsl.diag import Failure, fail
from rldsl.extras import missing_package
from rldsl.files import read_bytes
from rldsl.plan.codec import decode
from rldsl.plan.metrics_file import HISTOGRAMS, METRICS, SAMPLES, TABLES, Lines, histogram_lines, read
from rldsl.plan.projection import event_paths
from rldsl.python.errors import reports_failures
from rldsl.python.html import table
from rldsl.python.plan import Plan, opened
from rldsl.runtime.metrics import run_record

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")
MODEL, ADAPTERS = "config.json", "adapter_config.json"  # a saved model has one of them
RECENT = 10          # steps that a notebook shows


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """A run on disk. In a notebook it shows its last steps."""

    folder: Path  # its directory; a text becomes a path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    @reports_failures
    def record(self) -> dict[str, Any]:
        """What `run.json` says: program, params, state, start and end. docs/metrics.md lists the fields. Raises RL0783
        where the directory holds no run."""
        found = run_record.read_record(self.folder)
        if found is None:
            raise fail("RL0783", "no run in this directory", place=str(self.folder),
                       help="`rldsl.runs(DIR)` lists the runs below a directory")
        return found

    @property
    def state(self) -> str:
        """"running", "finished", "stopped" (it may be resumed) or "failed"."""
        return str(self.record["state"])

    @property
    def step(self) -> int:
        """The last step that was made."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    @reports_failures
    def lines(self) -> Lines:
        """The metrics of each step, as plain dicts: one per line of `metrics.jsonl`. Raises RL0784."""
        try:
            return read(self.folder / METRICS)
        except FileNotFoundError:
            return []

    @property
    @reports_failures
    def metrics(self) -> pandas.DataFrame:
        """The metrics as a table: one row per step, one column per metric; NaN where a step has no value. Needs pandas
        (RL0097)."""
        return _frame(self.lines, "step")

    @property
    @reports_failures
    def samples(self) -> pandas.DataFrame:
        """Sampled sequences as a table with the columns batch, step, row, prompt, completion and one per value; empty
        unless the run was started with `log_samples`. Needs pandas (RL0097)."""
        rows = [{"batch": file.stem, **json.loads(line)} for file in sorted((self.folder / SAMPLES).glob("*.jsonl"))
                for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
        return _frame(rows)

    @property
    @reports_failures
    def tables(self) -> pandas.DataFrame:
        """The rows that the program logs with `metric table`, with the columns table, step, row, prompt, completion and
        one per column. Needs pandas (RL0097)."""
        rows = [{"table": file.stem, **json.loads(line)} for file in sorted((self.folder / TABLES).glob("*.jsonl"))
                for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
        return _frame(rows)

    @property
    @reports_failures
    def histograms(self) -> pandas.DataFrame:
        """What the program logs with `metric hist`: one row per step and histogram, with the columns step, metric, low,
        high, counts (of equally wide bins from low to high), below, above and nan. Needs pandas (RL0097). Raises
        RL0784."""
        try:
            lines = histogram_lines(self.folder / HISTOGRAMS)
        except FileNotFoundError:
            lines = []
        return _frame([{"step": line["step"], "metric": name, **h} for line in lines for name, h in line.items()
                       if name != "step"])

    @property
    @reports_failures
    def plan(self) -> Plan:
        """The plan that the run executes. Raises RL06xx where the copy in the directory is damaged."""
        file = self.folder / run_record.PLAN
        return opened(read_bytes(str(file)), str(file))

    @reports_failures
    def saved(self, model: str) -> Path:
        """The newest directory to which `save` wrote the model. Raises RL0798 where there is none."""
        file = str(self.folder / run_record.PLAN)
        plan = decode(read_bytes(file), file)
        paths = dict.fromkeys(e.saves_to for e, _ in event_paths(plan) if e.saves_to is not None and e.subject == model)
        found = [directory for path in paths for directory in _directories(path, self.folder)]
        if found:
            return max(found, key=lambda directory: directory.stat().st_mtime_ns)
        known = ", ".join(m.name for m in plan.models)
        raise fail("RL0798", f"the run has not saved `{model}`", place=str(self.folder),
                   help=f"its program does not save it: add `every 100 {{ save {model} }}` (models: {known})"
                   if not paths else "the step of its first save has not been reached"
                   if (run_record.read_record(self.folder) or {}).get("state") == run_record.RUNNING else
                   "it ended before the step of its first save: save more often, such as `every steps { save "
                   f"{model} }}` where `param steps` is the number of steps")

    @reports_failures
    def model(self, name: str) -> Any:
        """The newest saved model, loaded by transformers on the CPU, in evaluation mode. No code of the directory is
        executed. Raises RL0097, RL0798."""
        directory = str(self.saved(name))
        return _needs(lambda: _loaded(directory))

    @reports_failures
    def push_to_hub(self, name: str, model: str = "", *, private: bool = False, branch: str = "") -> str:
        """Send the newest saved model to the repository `name` ("owner/name") of the Hub, with a card that has the
        program, the plan's id and the metrics. The run may still be running. model: may be omitted if the program saves
        one only. Returns the address of the commit. Raises RL0095, RL0798."""
        from rldsl.python.push import push

        return push(self, name, model, private, branch)

    def __repr__(self) -> str:
        return f"<rldsl.Run {self.folder}: {self.state}, step {self.step}>"

    def _repr_html_(self) -> str:
        recent = self.lines[-RECENT:]
        names = tuple(dict.fromkeys(name for line in recent for name in line))
        rows = [tuple(f"{line[n]:.5g}" if n in line else "" for n in names) for line in recent]
        head = f"<p>{escape(str(self.folder))}: {self.state}, step {self.step}</p>"
        return head + (table(names, rows) if rows else "")


@reports_failures
def runs(folder: str | os.PathLike[str] = "runs") -> list[Run]:
    """The runs below a directory, the one that was started last first. Raises RL0783 where there is no directory."""
    if not Path(folder).is_dir():
        raise fail("RL0783", f"no such directory: {folder}", place=os.fspath(folder),
                   help="`rldsl.train(..., out=DIR)` and `rlc run --out DIR` create one for a run")
    return [Run(out) for out, _ in run_record.runs(Path(folder))]


def _directories(path: str, out: Path) -> list[Path]:
    """The existing directories that `save` wrote to under this path, with `{out}` and `{step}` in it."""
    pattern = re.escape(path).replace(re.escape("{out}"), re.escape(str(out))).replace(re.escape("{step}"), r"\d+")
    fixed = path.replace("{out}", str(out)).partition("{step}")[0]
    base = Path(fixed) if fixed.endswith("/") or "{step}" not in path else Path(fixed).parent
    found = {file.parent for name in (MODEL, ADAPTERS) for file in base.rglob(name)} if base.is_dir() else set()
    return sorted(directory for directory in found if re.fullmatch(pattern, str(directory)))


def _frame(rows: list[dict[str, Any]], index: str = "") -> pandas.DataFrame:
    def made() -> pandas.DataFrame:
        import pandas

        found = pandas.DataFrame(rows)
        return found.set_index(index) if index and rows else found

    return _needs(made)


def _loaded(directory: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, trust_remote_code=False).eval()


def _needs(make: Callable[[], T]) -> T:
    """Call what needs an optional package. Raises RL0097."""
    try:
        return make()
    except ModuleNotFoundError as error:
        if (found := missing_package(error)) is None:
            raise
        raise Failure([found]) from None
