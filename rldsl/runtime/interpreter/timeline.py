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
from rldsl.runtime.files import replace_text, written


@dataclass
class TimelineRecorder:
    """Events of one rank, in seconds since the epoch: comparable between the processes of a machine, and between
    machines as far as their clocks agree. zero: when this rank's monotonic clock was 0; read once, since the other one
    may be set while a run goes on. Of each span `args` also say how many seconds the process computed in it (busy)."""

    rank: int
    per_node: int = 1
    spans: list[trace.Span] = field(default_factory=list)
    computed: float = field(default_factory=time.process_time)
    zero: float = field(default_factory=lambda: time.time() - time.monotonic())

    def add(self, event: Event, step: int, begin: float, end: float) -> None:
        """begin, end: of the monotonic clock."""
        before, self.computed = self.computed, time.process_time()
        self.spans.append(trace.span(event, self.rank, self.per_node, step, self.zero + begin, end - begin,
                                     busy=round(self.computed - before, 6)))


def synchronize(device: torch.device) -> None:
    """What a GPU was asked for is done: else an event would end when it is posted, and the next that waits would take
    its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_timeline(recorder: TimelineRecorder, plan: Plan, file: Path, device: torch.device) -> None:
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
            replace_text(file, trace.document(plan, moved, "recorded"))
