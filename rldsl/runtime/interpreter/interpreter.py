"""A rank's interpreter: it goes through its own list of events, and that is all.

In: a plan, inside an initialised process group. Out: the run's files. The list is the plan's body filtered to this
rank; every wait is either inside an event or at the first read of what a transfer or a realloc brings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from rldsl.plan.traits import rule
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.health.watchdog import Watchdog
from rldsl.runtime.internal_error import present
from rldsl.runtime.interpreter import eval_loops, model_events, value_events
from rldsl.runtime.interpreter.metric_log import end_step, log
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.interpreter.rank_state import RankState, Services
from rldsl.runtime.interpreter.startup import begin_run, called_functions, prepare, run_record
from rldsl.runtime.interpreter.timeline import TimelineRecorder, synchronize, write_timeline
from rldsl.runtime.interpreter.train_event import train
from rldsl.runtime.metrics.reporter import Reporter
from rldsl.runtime.metrics.summary import summarise, write_summary
from rldsl.runtime.persist.checkpoint_writer import checkpoint
from rldsl.runtime.persist.model_export import save
from rldsl.runtime.plan_file import PlanFile
from rldsl.runtime.rewards.pool import RewardPool
from rldsl.runtime.state.model_store import ModelStore


def _checkpoint(state: RankState, event: Checkpoint) -> None:
    """The step's metrics are written first, so that no checkpoint is ahead of them."""
    services = state.services
    end_step(state.step, services.reporter)
    state.step.stopped = checkpoint(state.models, state.step, services.data, present(services.writer, "writer"), event)


# what each kind of event is given: the narrowest parts of the rank's state
HANDLERS: Mapping[type[Event], Callable[[RankState, Any], None]] = {
    Load: lambda s, e: model_events.load(s.models, s.services.resumed, e),
    Fetch: lambda s, e: value_events.fetch(s.step, s.services.data, e),
    Lengths: lambda s, e: value_events.lengths(s.step, e),
    Transfer: lambda s, e: value_events.transfer_values(s.step, s.services.ring, e),
    Realloc: lambda s, e: model_events.reallocate(s.models, s.services.ring, e),
    Offload: lambda s, e: model_events.offload(s.models, e),
    Onload: lambda s, e: model_events.onload(s.models, e),
    Generate: lambda s, e: model_events.generate(s.models, s.step, e),
    Infer: lambda s, e: model_events.infer(s.models, s.step, e),
    Train: lambda s, e: train(s.models, s.step, e),
    Compute: lambda s, e: value_events.compute(s.step, s.services.data, s.services.rewards, s.services.ring, e),
    Select: lambda s, e: value_events.select(s.step, e),
    Collect: lambda s, e: value_events.collect(s.step, e),
    Save: lambda s, e: save(s.models, s.step.number, e),
    Checkpoint: _checkpoint,
    Log: lambda s, e: log(s.step, e),
    Free: lambda s, e: value_events.free(s.models, s.step, e),
}


@dataclass
class Interpreter:
    """A rank on its way through its own list."""

    state: RankState
    # the plan's body, filtered to this rank
    own: Sequence[Item]
    # of the timeline, where one is recorded
    recorder: TimelineRecorder | None = None
    # number of loops around the current item
    depth: int = 0

    def run(self) -> None:
        """The whole list."""
        self.run_items(self.own)

    def run_items(self, items: Sequence[Item], turn: int = 1) -> None:
        """turn: iteration of the innermost loop, from 1."""
        for item in items:
            if isinstance(item, Event):
                self.run_event(item)
            elif isinstance(item, Every):
                if turn % item.period == 0:
                    self.run_items(item.body, turn)
            else:
                for i in self.turns(item):
                    self.run_items(item.body, i)

    def run_event(self, event: Event) -> None:
        state, services = self.state, self.state.services
        services.ring.begins(event)
        services.reporter.begins(event)
        begin = time.monotonic()
        rule(HANDLERS, event, "the interpreter")(state, event)
        if self.recorder is not None:
            synchronize(state.context.device)
        end = time.monotonic()
        services.ring.ends()
        services.reporter.took(event, end - begin)
        if self.recorder is not None:
            self.recorder.add(event, state.step.number, begin, end)

    def turns(self, loop: Loop) -> Iterator[int]:
        """The iterations of a loop, from 1. A generator: a step starts before its `yield` and ends after it. The
        outermost loop is that of the steps."""
        context, step, services, steps = self.state.context, self.state.step, self.state.services, self.depth == 0
        outer, step.evaluated_source = (step.turn, step.evaluated_source), loop.over
        trips = eval_loops.num_turns(services.data, loop) if loop.over else loop.trips
        if not steps:
            services.reporter.entered(loop.id)
        for buffer in loop.collects:
            if context.holds(buffer):
                value_events.make_empty(step, buffer)
        self.depth += 1
        for i in range(1 + (step.number if steps else 0), trips + 1):
            step.turn = i - 1
            services.ring.turn(self.depth - 1, i)
            if steps:
                step.begin()
            else:
                services.reporter.turned(loop.id)
            yield i
            if steps:
                end_step(step, services.reporter)
                if step.stopped:
                    break
            if loop.until:
                enough = bool(step.buffers.take(loop.until).data)
                step.buffers.free(loop.until)
                if enough:
                    break
        self.depth -= 1
        services.ring.turn(self.depth, 0)
        step.turn, step.evaluated_source = outer


def execute(file: PlanFile, out: str | Path, device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
            watchdog: Watchdog | None = None, options: Options = Options(),  # noqa: B008 (immutable)
            run: Callable[[Interpreter], None] = Interpreter.run, begun: Callable[[], None] = lambda: None) -> None:
    """Run a plan as rank dist.get_rank().

    out: directory of what the run writes. run: goes through the rank's list (an emitted program has its own way).
    begun: called by rank 0 once the directory is this run's.

    Everything that can be checked is checked before the first step: the plan, the data, the functions, the files.
    Errors: a Failure, with the codes of everything that is checked."""
    start = prepare(file, out, device, watchdog, options)
    context, step = start.context, start.step
    ring = EventRing() if watchdog is None else watchdog.ring
    first = step.number
    recorder = TimelineRecorder(context.rank, context.plan.header.devices_per_node) if options.trace else None
    functions = called_functions(context, start.own)
    with RewardPool(functions, options.reward_workers, options.reward_seconds, context.rank) as rewards:
        begin_run(context, start.resumed, options, begun)
        if watchdog is not None:  # a dump belongs to a run, and there is one from here on
            watchdog.out = context.out
        with (Reporter(context, step, start.data, options.reporting) as reporter,
              run_record(context, step, file, options.reporting.command, options.continues) as interruption):
            if watchdog is not None:
                watchdog.interruption = interruption
            services = Services(start.data, rewards, reporter, ring, start.writer, start.resumed)
            state = RankState(context, ModelStore(context), step, services)
            begin = time.monotonic()
            run(Interpreter(state, start.own, recorder))
            seconds = time.monotonic() - begin
            if recorder is not None:
                write_timeline(recorder, context.plan, Path(str(options.trace)), device)
            _finish(state)
    if context.rank == 0:
        if step.stopped:
            print(f"stopped after step {step.number} as requested; use `--resume` to continue from there",
                  file=sys.stderr,
                  flush=True)
        made = step.number - first
        write_summary(context.plan, context.out, summarise(context.plan, context.out, step.number, made, seconds))


def _finish(state: RankState) -> None:
    """Nothing may be left on its way when the processes end."""
    state.step.buffers.settle()
    state.models.wait_all()
    state.services.ring.over()
    if state.services.writer is not None:
        state.services.writer.finish(state.context)
    dist.barrier()
