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
from rldsl.plan.naming import Labels
from rldsl.runtime.collectives import all_gather
from rldsl.runtime.files import replace_text, written


@dataclass
class TimelineRecorder:
    """Events of one rank, in seconds since the epoch: comparable between the processes of a machine, and between
    machines as far as their clocks agree. The `args` of each span also have the CPU seconds of the process in it
    ("busy"), and the seconds in which it waited for what an earlier event had started ("waited"), such as rows that a
    transfer brings."""

    rank: int                                              # whose events these are
    per_node: int = 1                                      # devices of a node
    labels: Labels = Labels({})                            # of the plan's values
    spans: list[trace.Span] = field(default_factory=list)  # so far, in the order of execution
    # CPU seconds of this process until the last event
    cpu_seconds: float = field(default_factory=time.process_time)
    # the time of day at which the monotonic clock was 0; read once, since the time of day may be set during a run
    zero: float = field(default_factory=lambda: time.time() - time.monotonic())

    def add(self, event: Event, step: int, begin: float, end: float, waited: float = 0.0) -> None:
        """Record an event. begin, end: seconds of the monotonic clock. waited: seconds between them."""
        before, self.cpu_seconds = self.cpu_seconds, time.process_time()
        self.spans.append(trace.span(self.labels.event(event), self.rank, self.per_node, step, self.zero + begin,
                                     end - begin, busy=round(self.cpu_seconds - before, 6), waited=round(waited, 6)))


def synchronize(device: torch.device) -> None:
    """Wait for the GPU. Otherwise an event would seem to end when its kernels are launched, and the next one that waits
    would be charged for them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_timeline(recorder: TimelineRecorder, plan: Plan, file: Path, device: torch.device) -> None:
    """Write the events of all ranks to one file, on rank 0; the first begins at 0. All ranks call it together."""
    encoded = torch.frombuffer(bytearray(json.dumps(recorder.spans).encode()), dtype=torch.uint8).to(device)
    sizes = all_gather(torch.tensor(encoded.numel(), device=device)).tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    gathered = [torch.empty_like(padded) for _ in sizes] if recorder.rank == 0 else None
    dist.gather(padded, gathered, dst=0)
    if gathered is not None:
        spans = [s for part, size in zip(gathered, sizes, strict=True)
                 for s in json.loads(part[:size].cpu().numpy().tobytes())]
        zero = min((s["ts"] for s in spans), default=0.0)
        moved = [s | {"ts": round(s["ts"] - zero, 3)} for s in spans]
        with written(file):
            replace_text(file, trace.document(plan, moved, "recorded"))
