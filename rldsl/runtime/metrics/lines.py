"""Files with one JSON object a line, each of a step: `metrics.jsonl`, samples. A run that goes on keeps them."""

from __future__ import annotations

import json
from pathlib import Path


def truncate(file: Path, step: int) -> None:
    """Keep the lines of the steps before `step`; from 1 on, none. A line that a crash cut is dropped."""
    kept: list[str] = []
    if step > 1 and file.exists():
        with file.open(encoding="utf-8", newline="\n") as opened:  # a text may hold other ends of lines
            kept = [line for line in opened if line.endswith("\n") and json.loads(line)["step"] < step]
    file.write_text("".join(kept), encoding="utf-8")
