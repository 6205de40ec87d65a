"""Files with one JSON object a line, each of a step: `metrics.jsonl`, samples. A run that goes on keeps them.

JSON has no word for what is not finite: such a number is null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def encoded(line: Mapping[str, Any]) -> str:
    """One line, without its end."""
    known = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}
    return json.dumps(known, ensure_ascii=False, allow_nan=False)


def truncate(file: Path, step: int) -> None:
    """Keep the lines of the steps before `step`; from 1 on, none. A line that a crash cut is dropped."""
    kept: list[str] = []
    if step > 1 and file.exists():
        with file.open(encoding="utf-8", newline="\n") as opened:  # a text may hold other ends of lines
            kept = [line for line in opened if line.endswith("\n") and json.loads(line)["step"] < step]
    file.write_text("".join(kept), encoding="utf-8")
