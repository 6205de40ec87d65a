"""Runs that are stopped, killed and resumed, in forked gloo worlds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rldsl.diag import Failure
from rldsl.plan.events import Checkpoint, Event
from rldsl.plan.metrics_file import MEASURED
from rldsl.runtime.health.event_ring import EventRing
from tests.world import _enter, context, run_world


class Steps(EventRing):
    """Counts the steps that come to their end."""

    seen = 0

    def begin_event(self, event: Event) -> None:
        super().begin_event(event)
        self.seen += isinstance(event, Checkpoint)


@dataclass
class Asker:
    """In the place of a `Watchdog`: asks the run to stop at the end of a step."""

    after: int
    ring: Steps = field(default_factory=Steps)
    stops_after_step: bool = False
    out: Path | None = None

    @property
    def stop_requested(self) -> bool:
        return self.ring.seen >= self.after

    def hold_if_terminated(self) -> None:
        """It asks for the end of a step, so nothing is held back between events."""


def run(plan: bytes, out: Path, resume: Path | None = None, stop_after: int = 0, again: bool = False,
        like: Path | None = None) -> list[str]:
    """The codes of the messages of each rank, "" where all went well. stop_after: steps after which rank 1 (or 0, of
    one) is asked to stop. like: the `out` of a run whose responses it gets too (`tests/responses.py`)."""
    world = json.loads(plan.splitlines()[0])["world"]
    return run_world(world, _sampling, _rank, like or out, like is not None, plan, str(out), str(resume) if resume else None,
                     stop_after, again, os.getcwd())


def _sampling(rank: int, run: Callable[..., str], like: Path, follow: bool, *rest: Any) -> str:
    from tests.responses import followed, recorded

    file = like.with_name(f"{like.name}-responses")
    with followed(file) if follow else recorded(file):
        return run(rank, *rest)


def _rank(rank: int, plan: bytes, out: str, resume: str | None, stop_after: int, again: bool, cwd: str) -> str:
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.metrics.run_record import claim_output
    from rldsl.runtime.plan_file import PlanFile

    os.chdir(cwd)
    last = int(os.environ["WORLD_SIZE"]) - 1
    watchdog: Any = Asker(stop_after) if stop_after and rank == last else None
    try:
        claimed = claim_output(Path(out), Path(resume) if resume else None, again)
        execute(PlanFile.from_bytes(plan, "test.plan"), out, watchdog=watchdog, options=Options(
            resume=claimed.resume, continues=claimed.continues, overwrite=not claimed.continues))
    except Failure as failure:
        return " ".join(d.code for d in failure.diagnostics) or "another rank"
    return ""


def lines(out: Path) -> list[dict[str, float]]:
    """The metrics, without what depends on the clock."""
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)}
            for line in (out / "metrics.jsonl").read_text().splitlines()]


def held(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {key: t for file in sorted(checkpoint.glob("*.safetensors")) for key, t in load_file(file).items()}


def steps(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def copy_first_steps(stopped: Path, out: Path, after: int) -> None:
    """Make `out` a copy of `stopped` as it was when its checkpoint after step `after` was the newest. Its metrics have
    lines of later steps, too, as those of a run that was killed there: what resumes it has to take them away."""
    shutil.copytree(stopped, out)
    for later in steps(out)[after:]:
        shutil.rmtree(out / "checkpoints" / later)
    assert newest(out) == after


def newest(out: Path) -> int:
    return max((int(p.name[5:]) for p in (out / "checkpoints").glob("step-*")), default=0)


def attempt(data: bytes, out: Path, steps: int, moment: float, victim: int) -> bool:
    """One start of all ranks. Once it has written `steps` more checkpoints, and `moment` seconds later or with the one
    after these, rank `victim` is killed; the others then lose contact, and are ended as torchrun does. Whether it was
    killed: else it had come to its end."""
    world, ctx = json.loads(data.splitlines()[0])["world"], context()
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = ctx.Pipe(duplex=False)
        arguments = (data, str(out), None, 0, True, os.getcwd())
        ranks = [ctx.Process(target=_enter, args=(r, world, f"{place}/store", theirs, _rank, arguments), daemon=True)
                 for r in range(world)]
        before = newest(out)
        for process in ranks:
            process.start()
        while ranks[victim].is_alive() and newest(out) < before + steps:
            time.sleep(0.005)
        end = time.monotonic() + moment
        while ranks[victim].is_alive() and time.monotonic() < end and newest(out) <= before + steps:
            time.sleep(0.005)
        ranks[victim].kill()
        ranks[victim - 1].join(0.2)
        for process in ranks:
            process.kill()
            process.join(60)
        ours.close()
        return ranks[victim].exitcode == -signal.SIGKILL
