"""`rlc run`: a program or plan, one process for each rank, on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rldsl import api
from rldsl.commands import Usage
from rldsl.diag import fail
from rldsl.plan.codec import encode
from rldsl.plan.expr import Scalar
from rldsl.runtime.metrics.record import CONTRADICTION, claim, within


def run(file: str, sets: Mapping[str, Scalar], place: str | None, overrides: Sequence[str], out: str,
        trace: str | None, nproc: int | None, resume: str | None = None, overwrite: bool = False,
        options: Sequence[str] = ()) -> int:
    """resume: go on from the newest checkpoint of this run, or from this checkpoint; "": of the run in `out`.
    overwrite: remove the run that is there. options: further ones of `rldsl.run`. The exit status of the ranks. Errors: RL0096
    another number of processes than the plan needs; RL0763, RL0781 there is a run already."""
    origin = None if resume is None else Path(resume or out)
    if overwrite and origin and within(Path(out), origin):
        raise Usage(CONTRADICTION)
    claim(Path(out), origin, overwrite=overwrite)
    with tempfile.TemporaryDirectory(prefix="rlc-") as folder:
        if file.endswith(".plan"):
            if sets or place or overrides:
                raise Usage("a plan is fixed: give --set, --place and --on when compiling it")
            plan, path = api.read_plan(file), file
        else:
            plan = api.compile(file, sets, place, overrides)
            path = str(Path(folder) / f"{Path(file).stem}.plan")
            Path(path).write_bytes(encode(plan))
        world = plan.header.world
        if nproc not in (None, world):
            raise fail("RL0096", f"the plan is for {world} rank{'s' * (world > 1)}, not {nproc}", place=file,
                       help=f"leave --nproc out, or write --nproc {world}")
        more = [*([f"--resume={origin}"] if origin else []), *(["--overwrite"] if overwrite else []), *options]
        return _launch(path, world, out, trace, more)


def _launch(plan: str, world: int, out: str, trace: str | None, options: Sequence[str]) -> int:
    """Start the ranks and wait for them; Ctrl-C reaches them too, SIGTERM is passed on, and they get time to stop."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))} | os.environ
    command = [sys.executable, "-m", "rldsl.runtime.launch", "--standalone", "--nproc-per-node", str(world), "-m",
               "rldsl.run", plan, "--out", out, *(["--trace", trace] if trace else []),
               "--command", shlex.join(["rlc", *sys.argv[1:]]), *options]
    process = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(timeout=15)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        return 130
