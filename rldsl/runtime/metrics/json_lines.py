"""Files with one JSON object per line, each of a step: `metrics.jsonl`, samples. A run that resumes keeps them.

JSON has no word for what is not finite: such a number is null."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rldsl.runtime.files import replace_text, written


def encoded(line: Mapping[str, Any]) -> str:
    """One line, without its end."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False)


class LineFiles:
    """Such files, as this start of a run writes them."""

    def __init__(self) -> None:
        self._begun: set[Path] = set()

    def append(self, file: Path, step: int, lines: Iterable[Mapping[str, Any]]) -> list[int]:
        """Write the lines of a step. Before the first ones of a file, what an earlier start wrote of this step and
        later ones is dropped. Returns what `truncate` does. RL0706 if the disk refuses."""
        damaged: list[int] = []
        with written(file):
            if file not in self._begun:
                file.parent.mkdir(exist_ok=True)
                damaged = truncate(file, step)
                self._begun.add(file)
            with file.open("a", encoding="utf-8") as opened:
                opened.writelines(f"{encoded(line)}\n" for line in lines)
        return damaged


def truncate(file: Path, step: int) -> list[int]:
    """Keep the lines of the steps before `step`; from 1 on, none. Returns the numbers of damaged lines, which are
    dropped; a last one that a crash cut is not among them. Until the new file is whole, the old one stays. OSError."""
    kept: list[str] = []
    damaged: list[int] = []
    if step > 1 and file.exists():
        # a text may hold other ends of lines
        with file.open(encoding="utf-8", errors="replace", newline="\n") as opened:
            for number, line in enumerate(opened, 1):
                at = _step(line)
                if line.endswith("\n") and 0 <= at < step:
                    kept.append(line)
                elif at < 0 and line.endswith("\n"):
                    damaged.append(number)
    replace_text(file, "".join(kept))
    return damaged


def _step(line: str) -> int:
    """The step of a line; -1 if it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return -1
    step = record.get("step") if isinstance(record, dict) else None
    return step if type(step) is int else -1
