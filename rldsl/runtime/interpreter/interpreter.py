"""A rank walks its own list of events; that is all.

In: the bytes of a plan, inside an initialised process group. Out: the run's files. The list is the plan's body filtered
to this rank; every wait is either inside an event or at the first read of what a transfer or a realloc brings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.plan.events import (
    Checkpoint,
    Collect,
    Compute,
    Event,
    Every,
    Fetch,
    Free,
    Generate,
    Infer,
    Item,
    Lengths,
    Load,
    Log,
    Loop,
    Offload,
    Onload,
    Realloc,
    Save,
    Select,
    Train,
    Transfer,
)
from rldsl.runtime.health.watchdog import Watch
from rldsl.runtime.interpreter import model_events, value_events
from rldsl.runtime.interpreter.eval_loops import turns
from rldsl.runtime.interpreter.metric_log import end_step, log
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.interpreter.startup import functions, prepare, recorded, settle
from rldsl.runtime.interpreter.state import State
from rldsl.runtime.interpreter.timeline import Recorder, settled, write
from rldsl.runtime.interpreter.train_event import train
from rldsl.runtime.metrics.reporter import Report
from rldsl.runtime.metrics.summary import summarise, write_summary
from rldsl.runtime.persist.checkpoint_writer import checkpoint, finish
from rldsl.runtime.persist.model_export import save
from rldsl.runtime.rewards.pool import Pool

HANDLERS: Mapping[type[Event], Callable[[State, Event], None]] = {
    Load: model_events.load, Fetch: value_events.fetch, Lengths: value_events.lengths, Transfer: value_events.move, Realloc: model_events.reallocate,
    Offload: model_events.offload, Onload: model_events.onload, Generate: model_events.generate, Infer: model_events.infer, Train: train,
    Compute: value_events.compute, Select: value_events.select, Collect: value_events.collect, Save: save,
    Checkpoint: checkpoint, Log: log, Free: value_events.free,
}


@dataclass
class Walk:
    """A rank on its way through its own list. depth: number of loops around what it is at."""

    state: State
    own: Sequence[Item]
    recorder: Recorder | None = None
    depth: int = 0

    def whole(self) -> None:
        self.items(self.own)

    def items(self, items: Sequence[Item], turn: int = 1) -> None:
        """turn: iteration of the innermost loop, from 1."""
        for item in items:
            if isinstance(item, Event):
                self.event(item)
            elif isinstance(item, Every):
                if turn % item.period == 0:
                    self.items(item.body, turn)
            else:
                assert isinstance(item, Loop)
                for i in self.turns(item):
                    self.items(item.body, i)

    def event(self, event: Event) -> None:
        assert self.state.report is not None
        self.state.ring.begins(event)
        self.state.report.begins(event)
        begin = time.monotonic()
        HANDLERS[type(event)](self.state, event)
        if self.recorder is not None:
            settled(self.state.device)
        end = time.monotonic()
        self.state.ring.ends()
        self.state.report.took(event, end - begin)
        if self.recorder is not None:
            self.recorder.add(event, self.state.step, begin, end)

    def turns(self, loop: Loop) -> Iterator[int]:
        """The iterations of a loop, from 1. A generator: a step starts before its `yield` and ends after it. The
        outermost loop is that of the steps."""
        state, steps = self.state, self.depth == 0
        assert state.report is not None
        outer, state.over = (state.turn, state.over), loop.over
        trips = turns(state, loop) if loop.over else loop.trips
        if not steps:
            state.report.entered(loop.id)
        for buffer in loop.collects:
            if state.holds(buffer):
                value_events.empty(state, buffer)
        self.depth += 1
        for i in range(1 + (state.step if steps else 0), trips + 1):
            state.turn = i - 1
            state.ring.turn(self.depth - 1, i)
            if steps:
                state.begin_step()
            else:
                state.report.turned(loop.id)
            yield i
            if steps:
                end_step(state)
                if state.stopped:
                    break
            if loop.until:
                enough = bool(state.store.take(loop.until).data)
                state.store.free(loop.until)
                if enough:
                    break
        self.depth -= 1
        state.ring.turn(self.depth, 0)
        state.turn, state.over = outer


def execute(data: bytes, name: str, out: str | Path, device: torch.device = torch.device("cpu"),
            watch: Watch | None = None, options: Options = Options(),
            walk: Callable[[Walk], None] = Walk.whole, begun: Callable[[], None] = lambda: None) -> None:
    """Run a plan as rank dist.get_rank(). name: of the plan file, for messages. out: directory of what the run writes.
    walk: goes through the list (that of an emitted program is its own). begun: called by rank 0 once the directory is
    this run's.

    Everything that can be checked is checked before the first step: the plan, the data, the functions, the files."""
    state, own = prepare(data, name, out, device, watch, options)
    if watch is not None:
        state.ring = watch.ring
    began_at = state.step
    recorder = Recorder(state.world.rank, state.plan.header.devices_per_node) if options.trace else None
    with Pool(functions(state, own), options.reward_workers, options.reward_seconds, state.world.rank) as state.rewards:
        settle(state, options, begun)
        if watch is not None:  # a dump belongs to a run, and there is one from here on
            watch.out = state.out
        with (Report(state, options.asked) as state.report,
              recorded(state, data, options.asked.command, options.goes_on)):
            start = time.monotonic()
            walk(Walk(state, own, recorder))
            seconds = time.monotonic() - start
            if recorder is not None:
                write(recorder, state.plan, Path(str(options.trace)), device)
            _finish(state)
    if state.world.rank == 0:
        if state.stopped:
            print(f"stopped after step {state.step}, as asked; `--resume` goes on from there", file=sys.stderr,
                  flush=True)
        made = state.step - began_at
        write_summary(state.plan, state.out, summarise(state.plan, state.out, state.step, made, seconds))


def _finish(state: State) -> None:
    """Nothing may be left on its way when the processes end."""
    state.store.settle()
    for key in list(state.arriving):
        state.settled(*key)
    state.ring.over()
    if state.writer is not None:
        finish(state)
    dist.barrier()
