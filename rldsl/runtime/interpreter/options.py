"""What the user chooses when starting a run. None of it changes the numbers of the run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from rldsl.runtime.metrics.reporter import ReportOptions
from rldsl.runtime.rewards.pool import SECONDS_PER_ROW


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one start of a run, the same on all ranks."""

    # file for the recorded timeline
    trace: str | None = None
    # steps that torch's profiler records
    profile: int = 0
    # a checkpoint, or the directory of a run, to resume from
    resume: str | Path | None = None
    # the run continues what is in its directory (`metrics/run_record.py`, `claim_output`)
    continues: bool = False
    # remove what an earlier run left, once this one has passed all checks
    overwrite: bool = False
    # processes in which each rank calls users' functions; 0: in its own process, without a time limit
    reward_workers: int = 0
    # time limit of users' functions per row
    reward_seconds: float = SECONDS_PER_ROW
    # directories besides the run's and the working directory in which models may be saved
    allow_write: tuple[str, ...] = ()
    # run Python functions even if their files have changed since the plan was compiled
    changed_python: bool = False
    # decode every image of the data before the first step
    check_images: bool = False
    # what is shown and written during the run
    reporting: ReportOptions = ReportOptions()
    # how long a rank waits for another; None: torch's own limit
    timeout: timedelta | None = None
