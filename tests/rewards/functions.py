"""Functions of users for the tests: written to a file, as the compiler would record them."""

from __future__ import annotations

import ast
import hashlib
import os
import time
from pathlib import Path

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.local_modules import local_modules
from rldsl.plan.model import Function
from rldsl.runtime.rewards.pool import RewardPool

ROWS = [{"prompt": f"{i}+1=", "completion": str(i), "answer": str(i % 3)} for i in range(40)]
EACH = """
def score(rows):
    return [one(row) for row in rows]
"""


def written(folder: Path, body: str, name: str = "score", file: str = "rewards.py") -> Function:
    path = folder / file
    path.write_text(body)
    return recorded(path, name)


def recorded(path: Path, name: str = "score") -> Function:
    """A function as the compiler records it."""
    data = path.read_bytes()
    try:
        modules = local_modules(str(path), ast.parse(data))
    except (SyntaxError, ValueError):
        modules = ()
    return Function(f"{path.name}:{name}", str(path), name, hashlib.sha256(data).hexdigest(), modules=modules)


def mistake(function: Function, workers: int = 2, limit: float = 30.0, loading: float = 30.0,
            rows: list = ROWS) -> Diagnostic:
    """The one message of a pool that must fail."""
    try:
        with RewardPool([function], workers, limit, loading=loading) as pool:
            pool.call(function, rows, [f"{i} (rows.jsonl:{i + 1})" for i in range(len(rows))])
    except Failure as failure:
        (found,) = failure.diagnostics
        return found
    raise AssertionError("all went well")


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within: float = 5.0) -> bool:
    until = time.monotonic() + within
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(lives, pids))


def noted(folder: Path) -> list[int]:
    """Process ids that functions have left as names of files in `folder`."""
    return [int(name) for name in os.listdir(folder) if name.isdigit()]
