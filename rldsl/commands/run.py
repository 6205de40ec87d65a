"""`rlc run`: a program or plan, one process for each rank, on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
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
from rldsl.progress import Interrupted, stage
from rldsl.runtime.metrics.default_output import free_output, newest_output, output_of
from rldsl.runtime.metrics.run_record import (
    CONTRADICTION,
    FAILED,
    FINISHED,
    STOPPED,
    claim_output,
    is_own_checkpoint,
    read_record,
)

PATIENCE = 8.0  # seconds that the ranks have to end after Ctrl-C


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
        more = [*([f"--resume={origin}"] if origin else []), *(["--overwrite"] if overwrite else []), *options]
        before = read_record(Path(out))
        status = _launch(path, world, out, trace, more, quiet)
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


def _launch(plan: str, world: int, out: str, trace: str | None, options: Sequence[str], quiet: bool) -> int:
    """Start the ranks and wait for them; Ctrl-C reaches them too, SIGTERM is passed on, and they get time to stop. They
    end, too, when this process is killed."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))} | os.environ
    command = [sys.executable, "-m", "rldsl.runtime.launch", "--parent", str(os.getpid()), "--standalone",
               "--nproc-per-node", str(world), "-m", "rldsl.run", plan, "--out", out,
               *(["--trace", trace] if trace else []), "--command", shlex.join(["rlc", *sys.argv[1:]]), *options]
    stage("")  # the ranks report
    earlier = read_record(Path(out))
    process = subprocess.Popen(command, env=environment, stdout=2 if quiet else None)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    try:
        code = process.wait()
        status = code if code >= 0 else 128 - code  # a signal ended it: as a shell reports that
        if status == 128 + signal.SIGTERM and read_record(Path(out)) == earlier:
            print("terminated before the first step; to start again, repeat the command", file=sys.stderr, flush=True)
        return status
    except KeyboardInterrupt:
        _end_interrupted(process)
        held = read_record(Path(out))
        if held is not None and held != earlier and held["state"] == STOPPED:  # rank 0 has said where
            raise Interrupted from None
        raise Interrupted("interrupted before the first step; to start again, repeat the command") from None


def _end_interrupted(process: subprocess.Popen[bytes]) -> None:
    """A terminal sends Ctrl-C to every process; a signal to this one alone is passed on."""
    for number in (None, signal.SIGINT, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        try:
            process.wait(timeout=PATIENCE)
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
