"""Runs that are stopped, killed and resumed, in forked gloo worlds."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rldsl.diag import Failure
from rldsl.plan.events import Checkpoint, Event
from rldsl.runtime.metrics.names import MEASURED
from tests.world import run_world


@dataclass
class Asker:
    """In the place of a `Watch`: asks the run to stop at the end of a step."""

    after: int
    seen: int = 0
    waits: bool = False
    _at: Event | None = None

    @property
    def at(self) -> Event | None:
        return self._at

    @at.setter
    def at(self, event: Event) -> None:
        self._at = event
        self.seen += isinstance(event, Checkpoint)

    @property
    def asked(self) -> bool:
        return self.seen >= self.after


def run(plan: bytes, out: Path, resume: Path | None = None, stop_after: int = 0, again: bool = False) -> list[str]:
    """The codes of the messages of each rank, "" where all went well. stop_after: steps after which rank 1 (or 0, of one)
    is asked to stop."""
    world = json.loads(plan.splitlines()[0])["world"]
    return run_world(world, _rank, plan, str(out), str(resume) if resume else None, stop_after, again, os.getcwd())


def _rank(rank: int, plan: bytes, out: str, resume: str | None, stop_after: int, again: bool, cwd: str) -> str:
    from rldsl.runtime.executor import execute
    from rldsl.runtime.options import Options

    os.chdir(cwd)
    last = int(os.environ["WORLD_SIZE"]) - 1
    watch: Any = Asker(stop_after) if stop_after and rank == last else None
    try:
        execute(plan, "test.plan", out, watch=watch, options=Options(resume=resume, again=again))
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
