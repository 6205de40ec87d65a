"""The recorded timeline: when each rank ran each event, in the form of `plan/trace.py`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.plan import trace
from rldsl.plan.events import Event
from rldsl.plan.model import Plan
from rldsl.runtime.files import written


@dataclass
class Recorder:
    """Events of one rank; begin and end in seconds since the epoch. Of each span `args` also say how many seconds the
    process computed in it (busy)."""

    rank: int
    per_node: int = 1
    spans: list[trace.Span] = field(default_factory=list)
    computed: float = field(default_factory=time.process_time)

    def add(self, event: Event, step: int, begin: float, end: float) -> None:
        before, self.computed = self.computed, time.process_time()
        self.spans.append(trace.span(event, self.rank, self.per_node, step, begin, end - begin,
                                     busy=round(self.computed - before, 6)))


def now() -> float:
    """Seconds since the epoch: comparable between the processes of a machine, and between machines as far as their
    clocks agree."""
    return time.time()


def write(recorder: Recorder, plan: Plan, file: Path, device: torch.device) -> None:
    """Every rank's events into one file, written by rank 0; the first of them begins at 0. All ranks call it."""
    mine = torch.frombuffer(bytearray(json.dumps(recorder.spans).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device))
    padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in sizes] if recorder.rank == 0 else None
    dist.gather(padded, every, dst=0)
    if every is not None:
        spans = [s for part, size in zip(every, sizes) for s in json.loads(part[: int(size)].cpu().numpy().tobytes())]
        zero = min((s["ts"] for s in spans), default=0.0)
        moved = [s | {"ts": round(s["ts"] - zero, 3)} for s in spans]
        with written(file):
            file.write_text(trace.document(plan, moved, "recorded"))
