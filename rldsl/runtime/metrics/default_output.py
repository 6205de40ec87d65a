"""The directory of a run for which the user names none: `runs/PROGRAM`, then `runs/PROGRAM-2`, `runs/PROGRAM-3`, ...

In: the name of a program or plan. Out: a directory that holds no run, or the newest run there. Only `rlc run` chooses,
before any rank starts; a run that torchrun starts again must find the same directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from rldsl.runtime.metrics.run_lock import LOCK
from rldsl.runtime.metrics.run_record import RECORD, is_own_checkpoint, last_checkpoint, read_record

ROOT = Path("runs")


def free_output(file: str) -> Path:
    """The first of the program's directories that holds no run."""
    name = Path(file).stem
    numbered = (ROOT / (f"{name}-{n}" if n > 1 else name) for n in count(1))
    return next(out for out in numbered if not _is_taken(out))


def newest_output(file: str) -> Path | None:
    """The directory of the run that was started or resumed last; None if there is none."""
    runs = [(_last_start(out), number, out) for number, out in _directories(file) if os.path.lexists(out / RECORD)]
    return max(runs)[2] if runs else None


def output_of(file: str, resume: Path) -> Path | None:
    """The directory of the program's run that is resumed from: `resume` is the run, or a checkpoint of it."""
    return next((out for _, out in _directories(file) if is_own_checkpoint(out, resume)), None)


def _directories(file: str) -> Iterator[tuple[int, Path]]:
    """The directories that exist, with their numbers. The first of a program called PROGRAM-2 is not the second of
    PROGRAM."""
    name = Path(file).stem
    for out in sorted(ROOT.glob("*")):
        match = re.fullmatch(rf"{re.escape(name)}(?:-([2-9]|[1-9]\d+))?", out.name)
        if match is None or not out.is_dir():
            continue
        program = Path(str((read_record(out) or {}).get("program", ""))).stem
        if out.name == name or program != out.name:
            yield int(match[1] or 1), out


def _is_taken(out: Path) -> bool:
    if not out.is_dir():
        return os.path.lexists(out)
    return any(os.path.lexists(out / name) for name in (RECORD, LOCK)) or last_checkpoint(out) is not None


def _last_start(out: Path) -> str:
    """When the run was last started: UTC, ISO 8601; "" if the record does not say."""
    record = read_record(out) or {}
    return max(str(record.get("started", "")), *map(str, record.get("resumed", [])), "")
