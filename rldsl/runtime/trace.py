"""The recorded timeline: when each rank ran each event, as Chrome trace JSON, which Perfetto and chrome://tracing
read."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.plan.events import Event
from rldsl.runtime.files import written


@dataclass
class Recorder:
    """Events of one rank: name, id, source position, step, begin and end in microseconds since the epoch."""

    rank: int
    spans: list[dict] = field(default_factory=list)

    def add(self, event: Event, step: int, begin: float, end: float) -> None:
        op = type(event).__name__.lower()
        self.spans.append({
            "name": f"{op} {getattr(event, 'model', '') or getattr(event, 'program', '')}".strip(), "cat": op,
            "ph": "X", "pid": self.rank, "tid": 0, "ts": begin * 1e6, "dur": (end - begin) * 1e6,
            "args": {"event": event.id, "at": event.at, "step": step, "because": event.because}})


def now() -> float:
    """Seconds since the epoch: comparable between the processes of a machine."""
    return time.time()


def write(recorder: Recorder, file: Path, device: torch.device) -> None:
    """Every rank's events into one file, written by rank 0. All ranks call it."""
    mine = torch.tensor(list(json.dumps(recorder.spans).encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device))
    longest = max(int(s) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    every = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(every, padded)
    if recorder.rank == 0:
        spans = [s for part, size in zip(every, sizes) for s in json.loads(bytes(part[: int(size)].tolist()))]
        with written(file):
            file.write_text(json.dumps({"traceEvents": spans, "displayTimeUnit": "ms"}))
