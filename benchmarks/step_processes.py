"""The processes of a system that is measured: started, watched, and ended whatever happens.

In: an interpreter, a module that calls `serve` (`step_work.py`), and its `Work`. Out: the `Times` of its first process,
or why there are none. A system that does not start its other ranks itself gets one process for each rank, with the
environment variables of torchrun, to which accelerate listens.
Invariant: no process outlives `measured`, nor what it started: each has its own session, which is killed. Where the
process that measures is killed, they notice (`serve`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.step_work import Times, Work
from rldsl.runtime.local_ranks import held_port

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 3600.0  # seconds that a measurement takes at most; it takes minutes
PERIOD = 0.05   # seconds between looks
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
               "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Rank:
    """A process, and the files that have what it wrote."""

    process: subprocess.Popen[bytes]
    out: Path
    errors: Path


def measured(python: str, module: str, work: Work, processes: int = 1, limit: float = LIMIT) -> Times | str:
    """processes: that are started here, one for each rank of `work`, or one that starts the others. A failure is the
    standard error of the only process; of several, the last line of the one that failed first."""
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory() as place, held_port() as port:
        try:
            for i in range(processes):
                variables = _of_rank(i, processes, port) if processes > 1 else {}
                ranks.append(_start([python, "-m", module, json.dumps(asdict(work))], variables, Path(place) / str(i)))
            failure = _failure(ranks, limit)
        finally:
            _end(ranks)
        return Times(**json.loads(ranks[0].out.read_text().strip().splitlines()[-1])) if failure is None else failure


def _of_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """ACCELERATE_USE_CPU: otherwise accelerate would look for accelerators."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    return {name: str(value) for name, value in variables.items()}


def _start(command: Sequence[str], variables: dict[str, str], place: Path) -> Rank:
    out, errors = place.with_suffix(".out"), place.with_suffix(".errors")
    with out.open("wb") as to, errors.open("wb") as to_errors:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=to, stderr=to_errors,
                                   start_new_session=True, env=os.environ | ENVIRONMENT | variables)
    return Rank(process, out, errors)


def _failure(ranks: Sequence[Rank], limit: float) -> str | None:
    """None once all have ended as they should. Otherwise why not, once one has not."""
    until = time.monotonic() + limit
    while True:
        codes = [rank.process.poll() for rank in ranks]
        if failed := [i for i, code in enumerate(codes) if code]:
            # where a rank is killed, the others fail for want of it
            first = min(failed, key=lambda i: (codes[i] or 0) > 0)
            why = _why(ranks[first])
            return why if len(ranks) == 1 else f"rank {first}: {_last_line(why, first)}"
        if None not in codes:
            return None
        if time.monotonic() > until:
            return f"it had not ended after {limit:.0f} s"
        time.sleep(PERIOD)


def _why(rank: Rank) -> str:
    """That a process has failed: at least one line."""
    if rank.process.returncode < 0:
        return f"killed by signal {-rank.process.returncode}"
    return rank.errors.read_text(errors="replace").strip() or "it said nothing"


def _last_line(why: str, rank: int) -> str:
    return why.splitlines()[-1].removeprefix(f"[rank{rank}]: ")  # by which torch begins each line of a traceback


def _end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):  # it has ended, as has all that it started
            os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
