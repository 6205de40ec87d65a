"""The metrics of a run as a file: one JSON object a line, each of a step, numbers by name.

In: the file's path. Out: its lines. Errors: RL0784 a file that cannot be read, or a line of another form.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rldsl.diag import fail

METRICS = "metrics.jsonl"  # in the directory of a run
HISTOGRAMS = "histograms.jsonl"  # next to it: those of `metric hist`, one line a step
TABLES = "tables"  # directory next to it: those of `metric table`, one file each, a line a row
SAMPLES = "samples"  # directory next to it: the sampled sequences, one file per generated batch
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "comet_ml")  # that `--report-to` knows
Lines = list[dict[str, float]]
# the fields that every run writes: no metric of a program may have such a name. The first says which step a line is of,
# the others are measured, and differ from run to run and from placement to placement
STEP, SECONDS, RATE = "step", "seconds", "tokens_per_second"
PHASES = ("generate", "infer", "train")
MEASURED = (SECONDS, RATE, *(f"time/{phase}" for phase in (*PHASES, "rest")), *(f"{RATE}/{phase}" for phase in PHASES),
            "length/response", "conversation/turns", "conversation/tool_seconds", "conversation/waiting",
            "conversation/slots_given_away",
            "conversation/errors", "moved/bytes", "memory/peak_bytes")
BUILT_IN = frozenset({STEP, *MEASURED})


def read(file: Path) -> Lines:
    """Return the lines, one a step; `null` is a number that was not finite. A last line that is not whole is left out:
    the run may be writing it. Raises FileNotFoundError where there is no file, since callers know what to say then."""
    return [_line(file, i, text) for i, text in enumerate(_texts(file), 1)]


def last(file: Path) -> dict[str, float]:
    """Return the line of the last step, `{}` before the first. Only this one is parsed. Raises as `read` does."""
    lines = _texts(file)
    return _line(file, len(lines), lines[-1]) if lines else {}


def histogram_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of `HISTOGRAMS`: {"step": 1, NAME: {low, high, counts, below, above, nan}}. Raises as `read` does."""
    return [_histogram_line(file, i, text) for i, text in enumerate(_texts(file), 1)]


def _histogram_line(file: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line: dict[str, Any] = json.loads(text)
        int(line["step"])
        if all(_is_histogram(h) for name, h in line.items() if name != STEP):
            return line
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise fail("RL0784", "this line does not contain the histograms of a step", place=f"{file}:{number}",
               help="the file is damaged; delete it to see the run without histograms")


def _is_histogram(h: Any) -> bool:
    counts = h["counts"]
    return (all(type(h[k]) in (int, float) for k in ("low", "high", "below", "above", "nan")) and len(counts) > 0
            and all(type(n) is int for n in counts))


def _texts(file: Path) -> list[str]:
    """Whole lines."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise fail("RL0784", f"the metrics cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}",
                   place=str(file), help="give the directory of a run (`--out` of `rlc run`); `rlc runs` lists them"
                   ) from None
    return lines[:-1]


def _line(file: Path, number: int, text: str) -> dict[str, float]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if isinstance(line, dict):
        line = {name: math.nan if value is None and name != "step" else value for name, value in line.items()}
    if not isinstance(line, dict) or "step" not in line or not all(type(v) in (int, float) for v in line.values()):
        raise fail("RL0784", "this line does not contain the metrics of a step", place=f"{file}:{number}",
                   help="each line must be a JSON object: {\"step\": 1, \"reward\": 0.5}")
    return line
