"""Files with one JSON object a line, each of a step: `metrics.jsonl`, samples. A run that goes on keeps them.

JSON has no word for what is not finite: such a number is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rldsl.runtime.files import replace_text


def encoded(line: Mapping[str, Any]) -> str:
    """One line, without its end."""
    known = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}
    return json.dumps(known, ensure_ascii=False, allow_nan=False)


def truncate(file: Path, step: int) -> None:
    """Keep the lines of the steps before `step`; from 1 on, none. A line that a crash cut, or that is none of ours, is
    dropped. Until the new file is whole, the old one stays. OSError."""
    kept: list[str] = []
    if step > 1 and file.exists():
        # a text may hold other ends of lines
        with file.open(encoding="utf-8", errors="replace", newline="\n") as opened:
            kept = [line for line in opened if line.endswith("\n") and 0 <= _step(line) < step]
    replace_text(file, "".join(kept))


def _step(line: str) -> int:
    """-1: none."""
    try:
        held = json.loads(line)
    except (ValueError, RecursionError):
        return -1
    found = held.get("step") if isinstance(held, dict) else None
    return found if type(found) is int else -1
