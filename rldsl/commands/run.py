"""`rlc run`: a program or plan, one process for each rank, on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rldsl import report
from rldsl.commands import Usage
from rldsl.commands.inputs import ENDING, plan_or_program
from rldsl.diag import Diagnostic, fail
from rldsl.plan.disk_paths import shown
from rldsl.plan.expr import Scalar
from rldsl.progress import Interrupted
from rldsl.python.start import EARLY, launch
from rldsl.runtime.message_file import collected
from rldsl.runtime.metrics.default_output import free_output, newest_output, output_of
from rldsl.runtime.metrics.run_record import (
    CONTRADICTION,
    FAILED,
    FINISHED,
    RUNNING,
    STOPPED,
    claim_output,
    is_own_checkpoint,
    read_record,
    refuse_without_checkpoint,
)

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit status, as a shell reports it


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What is left of a run."""

    status: int  # of the ranks: 0, or not 0 where one failed; 130 after Ctrl-C
    out: str     # its directory
    state: str   # as in its record: "finished", "stopped" or "failed"
    step: int    # the last one
    diagnostics: tuple[dict[str, Any], ...] = ()  # errors and warnings of its processes, as `rldsl.report` writes them
    line: str = ""  # where Ctrl-C stopped it, if no rank has said that


def run(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str], out: str | None,
        trace: str | None, nproc: int | None, resume: str | None = None, overwrite: bool = False,
        options: Sequence[str] = (), say: Callable[[str], None] = print, quiet: bool = False) -> EndedRun:
    """out: the directory of the run; None: a new one (`runtime/metrics/default_output.py`), which is printed.
    resume: resume from the newest checkpoint of this run, or from this checkpoint; "": of the run in `out`.
    overwrite: remove the run that is there. options: further ones of `rldsl.run`. say: prints a message for the user.
    quiet: what the ranks print goes to standard error, all of it. They say RL0703 themselves where a machine lacks
    GPUs. Errors: those of a plan that cannot run, before any rank starts; RL0096 another number of processes than the
    plan needs; RL0760 there is no checkpoint to resume from; RL0763, RL0781 there is a run already."""
    chosen = ""
    if not out:
        out, chosen = _default_output(file, resume, overwrite)
    origin = None if resume is None else Path(resume or out)
    if overwrite and origin and is_own_checkpoint(Path(out), origin):
        raise Usage(CONTRADICTION)
    claim_output(Path(out), origin, overwrite=overwrite)
    refuse_without_checkpoint(origin)
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
        before, messages, line = read_record(Path(out)), Path(folder) / "messages", ""
        try:
            status = launch(path, world, out, more, quiet, messages)
        except Interrupted as stop:
            status, line = INTERRUPTED, str(stop)
        record = read_record(Path(out))
        if record is None or record == before:  # the ranks ended before the first step
            record = {"state": _early_state(status)}
        elif status and record["state"] == RUNNING:  # of another run, which owns the directory
            record = {"state": FAILED}
        left = collected(messages)
        if status and not any(d["severity"] == "error" for d in left):
            left.append(report.record(_without_message(status, line)))
        return EndedRun(status, out, str(record["state"]), int(record.get("step", 0)), tuple(left), line)


def _early_state(status: int) -> str:
    """The state of a run whose ranks ended before they began a record."""
    if status in (INTERRUPTED, TERMINATED):
        return STOPPED
    return FAILED if status else FINISHED


def _without_message(status: int, line: str) -> Diagnostic:
    """What to report of ranks that left no error. line: where Ctrl-C stopped them, if that is known."""
    if status in (INTERRUPTED, TERMINATED):
        what = "interrupted" if status == INTERRUPTED else "terminated"
        title, _, advice = (line or f"{what} {EARLY}").partition("; ")
        return Diagnostic("RL0090", title, help=advice)
    return Diagnostic("RL0799", f"the ranks ended with exit status {status} and left no error message",
                      help="see what they printed to standard error, and the files in `log` of the run's directory")


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
