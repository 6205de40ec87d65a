"""What the systems answered when `make oracles` was last run with --record: the numbers with which `make test` compares
the library, without any of the systems."""

from __future__ import annotations

import json
from typing import Any

from tests.oracles.cases import Numbers
from tests.oracles.rows import HERE

FILE = HERE / "recorded.json"


def load() -> dict[str, Numbers]:
    """By case."""
    return {name: Numbers(found["values"], found["grads"]) for name, found in json.loads(FILE.read_text()).items()}


def save(answers: dict[str, Any], whole: bool) -> None:
    """One line for each case. whole: cases that were not asked are dropped."""
    old = {} if whole or not FILE.exists() else json.loads(FILE.read_text())
    merged = sorted((old | {name: found for name, found in answers.items() if "error" not in found}).items())
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in merged]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
