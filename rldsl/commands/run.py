"""`rlc run`: a program or plan, one process for each rank, on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rldsl.commands import Usage
from rldsl.commands.inputs import ENDING, plan_or_program
from rldsl.diag import fail
from rldsl.plan.disk_paths import shown
from rldsl.plan.expr import Scalar
from rldsl.python.start import launch
from rldsl.runtime.metrics.default_output import free_output, newest_output, output_of
from rldsl.runtime.metrics.run_record import (
    CONTRADICTION,
    FAILED,
    FINISHED,
    claim_output,
    is_own_checkpoint,
    read_record,
)


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What is left of a run."""

    status: int  # of the ranks: 0, or not 0 where one failed
    out: str     # its directory
    state: str   # as in its record: "finished", "stopped" or "failed"
    step: int    # the last one


def run(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str], out: str | None,
        trace: str | None, nproc: int | None, resume: str | None = None, overwrite: bool = False,
        options: Sequence[str] = (), say: Callable[[str], None] = print, quiet: bool = False) -> EndedRun:
    """out: the directory of the run; None: one of its own (`runtime/metrics/default_output.py`), which is printed.
    resume: go on from the newest checkpoint of this run, or from this checkpoint; "": of the run in `out`.
    overwrite: remove the run that is there. options: further ones of `rldsl.run`. say: tells the user something.
    quiet: what the ranks print goes to standard error, all of it. They say RL0703 themselves where a machine lacks
    GPUs. Errors: those of a plan that cannot run, before any rank starts; RL0096 another number of processes than the
    plan needs; RL0763, RL0781 there is a run already."""
    chosen = ""
    if not out:
        out, chosen = _default_output(file, resume, overwrite)
    origin = None if resume is None else Path(resume or out)
    if overwrite and origin and is_own_checkpoint(Path(out), origin):
        raise Usage(CONTRADICTION)
    claim_output(Path(out), origin, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="rlc-") as folder:
        plan, path = plan_or_program(file, sets, place, overrides), file
        if not file.endswith(ENDING):
            path = str(plan.save(Path(folder) / f"{Path(file).stem}{ENDING}"))
        world = plan.ranks
        if nproc not in (None, world):
            raise fail("RL0096", f"the plan is for {world} rank{'s' * (world > 1)}, not {nproc}", place=file,
                       help=f"omit --nproc, or use --nproc {world}")
        if world > (cores := os.cpu_count() or 1):
            say(f"{world} ranks share the {cores} core{'s' * (cores > 1)} of this machine (docs/cluster.md shows how "
                "to run a plan on several machines)")
        if chosen:
            say(chosen)
        more = [*(["--trace", trace] if trace else []), "--command", shlex.join(["rlc", *sys.argv[1:]]),
                *([f"--resume={origin}"] if origin else []), *(["--overwrite"] if overwrite else []), *options]
        before = read_record(Path(out))
        status = launch(path, world, out, more, quiet)
        record = read_record(Path(out))
        if record is None or record == before:  # the ranks ended before the first step
            return EndedRun(status, out, FAILED if status else FINISHED, 0)
        return EndedRun(status, out, str(record["state"]), int(record.get("step", 0)))


def _default_output(file: str, resume: str | None, overwrite: bool) -> tuple[str, str]:
    """The directory of a run, and the line that names it. What is resumed, or else overwritten, is the newest run of
    this program; any other run gets a new directory."""
    out, what = None, "output directory"
    if resume:
        out = output_of(file, Path(resume))
    elif resume is not None or overwrite:
        out, what = newest_output(file), f"newest run of {Path(file).name}"
    if out is None:
        out, what = free_output(file), "output directory"
    return str(out), f"{what}: {shown(str(out))}"
