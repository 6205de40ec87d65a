"""What the person who starts a run chooses, beside the plan. None of it changes the numbers of a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rldsl.runtime.metrics.reporter import Asked
from rldsl.runtime.rewards.pool import LIMIT


@dataclass(frozen=True, slots=True)
class Options:
    """trace: file for the recorded timeline. resume: a checkpoint, or the directory of a run, to go on from. goes_on:
    what is in the run's directory is its own, and it continues it (`metrics.record.claim`). overwrite: what an earlier
    run left is removed, once this one is known to be sound. reward_workers: processes in which each rank calls users'
    functions (0: in its own, without a limit). reward_seconds: how long these may take for a row.
    allow_write: directories outside of the run's and the working one in which saves may write. changed_python:
    functions are run though their files changed since the plan was compiled. asked: what is shown and written of the
    run. timeout: how long a rank waits for another (None: as long as torch does)."""

    trace: str | None = None
    resume: str | Path | None = None
    goes_on: bool = False
    overwrite: bool = False
    reward_workers: int = 0
    reward_seconds: float = LIMIT
    allow_write: tuple[str, ...] = ()
    changed_python: bool = False
    asked: Asked = Asked()
    timeout: timedelta | None = None
