"""torch's profiler over some steps of a run, with the plan's events as ranges.

In: the events of a rank, as they run. Out: `OUT/profile/rank-R.json`, a Chrome trace with operators, kernels, memory
and one range per event; on GPUs also NVTX ranges, for Nsight Systems, and `rank-R.memory.pickle`, a snapshot of the
allocator for https://docs.pytorch.org/memory_viz. The first step of a start is left out: it warms up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rldsl.plan.events import Event
from rldsl.plan.naming import Labels, describe_event
from rldsl.runtime.files import written
from rldsl.runtime.state.context import RunContext

FOLDER = "profile"  # in the directory of the run


class EventProfiler:
    """The profiler of one rank. It runs for `steps` steps, from the second step of this start of the run on."""

    def __init__(self, context: RunContext, device: torch.device, first: int, steps: int):
        """first: the last step that an earlier start has made."""
        self._out, self._rank, self._cuda = context.out / FOLDER, context.rank, device.type == "cuda"
        self._labels = Labels.of(context.plan.values, context.plan.frames)
        self._begin, self._end = first + 2, first + 2 + steps  # steps, the end excluded
        self._profile: Any = None

    @contextmanager
    def event(self, event: Event, step: int) -> Iterator[None]:
        """Around the execution of an event. step: the running one."""
        if self._profile is None and self._begin <= step < self._end:
            self._start()
        elif self._profile is not None and step >= self._end:
            self.close()
        if self._profile is None:
            yield
            return
        name = f"{describe_event(self._labels.event(event)).title} {event.at}".strip()
        if self._cuda:
            torch.cuda.nvtx.range_push(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            if self._cuda:
                torch.cuda.nvtx.range_pop()

    def close(self) -> None:
        """Write what was recorded. Called at the end of the run, too, which may come first."""
        if self._profile is None:
            return
        profile, self._profile, self._end = self._profile, None, 0
        profile.stop()
        with written(self._out):
            self._out.mkdir(parents=True, exist_ok=True)
            target = self._out / f"rank-{self._rank}.json"
            partial = target.with_name(f".{target.name}.partial")
            profile.export_chrome_trace(str(partial))
            os.replace(partial, target)
            if self._cuda:
                torch.cuda.memory._dump_snapshot(str(self._out / f"rank-{self._rank}.memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._profile = torch.profiler.profile(activities=kinds, profile_memory=True)
        self._profile.start()
