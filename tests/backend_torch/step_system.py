"""A system that measures nothing, for `test_step_processes.py`: what the name of its `Work` says happens to it.

Rank 1 does so where there are several; rank 0 then waits, as for a message that does not come. Each leaves its process
id, and that of a process that it has started, in the folder of the work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.step_work import Times, Work, serve

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")


def variables(work: Work) -> Times:
    """The environment in place of numbers."""
    return Times(tokens=[os.environ.get(name, "") for name in VARIABLES])  # type: ignore[misc]


def fails(work: Work) -> Times:
    _start(work)
    raise ValueError(f"the reason\n[rank{os.environ.get('RANK')}]: as torch writes it")


def silent(work: Work) -> Times:
    _start(work)
    sys.exit(3)


def killed(work: Work) -> Times:
    _start(work)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def hangs(work: Work) -> Times:
    _start(work)
    time.sleep(1000)
    raise AssertionError("not reached")


def _start(work: Work) -> None:
    rank = int(os.environ.get("RANK", "0"))
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    file = Path(work.folder, f"{rank}.pids")
    file.with_suffix(".new").write_text(f"{os.getpid()} {started.pid}")
    file.with_suffix(".new").rename(file)
    if rank < work.ranks - 1:
        time.sleep(1000)
    while len(list(Path(work.folder).glob("*.pids"))) < work.ranks:
        time.sleep(0.02)


if __name__ == "__main__":
    serve({"variables": variables, "fails": fails, "silent": silent, "killed": killed, "hangs": hangs})
