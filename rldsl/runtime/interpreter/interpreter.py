"""A rank's interpreter: it executes the events of the plan that name its rank, in their order, and nothing else.

In: a plan, inside an initialized process group. Out: the run's files. Every wait is either inside an event or at the
first read of what a transfer, a realloc or an onload brings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rldsl.diag import counted, present
from rldsl.plan.events import (
    EVERY_ITERATION,
    Checkpoint,
    Collect,
    Compute,
    Derive,
    Draw,
    Event,
    Fetch,
    Free,
    Generate,
    Infer,
    Item,
    Lengths,
    Load,
    Log,
    Lookup,
    Loop,
    Offload,
    Onload,
    Realloc,
    Sample,
    Save,
    Store,
    Train,
    Transfer,
    Update,
    When,
    ahead_of,
    runs_in,
    split_buffer,
)
from rldsl.plan.naming import Labels
from rldsl.plan.traits import rule_for
from rldsl.runtime.comm.agreement import sum_of_ranks
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.health.watchdog import Watchdog
from rldsl.runtime.interpreter import eval_loops, model_events, replay_events, row_states, value_events
from rldsl.runtime.interpreter.conversations import Environments
from rldsl.runtime.interpreter.derive import derive
from rldsl.runtime.interpreter.metric_log import end_step, log
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.interpreter.profiler import EventProfiler
from rldsl.runtime.interpreter.rank_inputs import called_functions, ends_late_conversations, open_environments
from rldsl.runtime.interpreter.rank_state import RankState, Services
from rldsl.runtime.interpreter.run_outcome import run_record
from rldsl.runtime.interpreter.startup import begin_run, prepare
from rldsl.runtime.interpreter.timeline import TimelineRecorder, synchronize, write_timeline
from rldsl.runtime.interpreter.train_event import train
from rldsl.runtime.metrics.reporter import Reporter
from rldsl.runtime.metrics.summary import summarize, write_summary
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint
from rldsl.runtime.persist.checkpoint_writer import checkpoint
from rldsl.runtime.persist.model_export import save
from rldsl.runtime.plan_file import PlanFile
from rldsl.runtime.rewards.pool import RewardPool
from rldsl.runtime.state import in_flight
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState


def _generate(state: RankState, event: Generate) -> None:
    if event.per_step:
        model_events.generate_a_part(state.models, state.step, event)
    elif event.conversation is None:
        model_events.generate(state.models, state.step, event)
    else:
        model_events.converse(state.models, state.step, state.services.environments, event)


def _checkpoint(state: RankState, event: Checkpoint) -> None:
    """Write a checkpoint, after the step's metrics: no checkpoint may be ahead of them."""
    services = state.services
    end_step(state.step, services.reporter)
    services.reporter.write_lines(wait=True)
    writer = present(services.writer, "checkpoint writer", place="run")
    state.step.stopped = checkpoint(state.models, state.step, services.data, writer, event,
                                    services.environments.timeouts)


# the handler of each kind of event, which gets only the parts of the rank's state that it needs
HANDLERS: Mapping[type[Event], Callable[[RankState, Any], None]] = {
    Load: lambda s, e: model_events.load(s.models, s.services.resumed, e),
    Fetch: lambda s, e: value_events.fetch(s.step, s.services.data, e),
    Draw: lambda s, e: row_states.draw(s.step, s.services.data, e),
    Lookup: lambda s, e: row_states.lookup(s.step, e),
    Update: lambda s, e: row_states.update(s.step, e),
    Lengths: lambda s, e: value_events.lengths(s.step, e),
    Transfer: lambda s, e: value_events.transfer_values(s.step, s.services.ring, e),
    Realloc: lambda s, e: model_events.realloc(s.models, s.services.ring, e),
    Offload: lambda s, e: model_events.offload(s.models, e),
    Onload: lambda s, e: model_events.onload(s.models, e),
    Generate: lambda s, e: _generate(s, e),
    Infer: lambda s, e: model_events.infer(s.models, s.step, e),
    Train: lambda s, e: train(s.models, s.step, e),
    Compute: lambda s, e: value_events.compute(s.step, s.services.data, s.services.rewards, s.services.ring, e),
    Derive: lambda s, e: derive(s.step, s.services, e),
    Collect: lambda s, e: value_events.collect(s.step, e),
    Store: lambda s, e: replay_events.store(s.step, e),
    Sample: lambda s, e: replay_events.sample(s.step, e),
    Save: lambda s, e: save(s.models, s.step.number, e),
    Checkpoint: _checkpoint,
    Log: lambda s, e: log(s.step, s.services.ring, e),
    Free: lambda s, e: value_events.free(s.models, s.step, e),
}


@dataclass
class Interpreter:
    """Executes the plan on one rank."""

    state: RankState                          # what the handlers work on
    items: Sequence[Item]                     # the plan's body, filtered to this rank
    recorder: TimelineRecorder | None = None  # records the timeline; None without `--trace`
    profiler: EventProfiler | None = None     # torch's; None without `--profile`
    depth: int = 0                            # number of loops around the current item
    iteration: int = 0                        # of the step loop: the step of events that do not run ahead
    resumed: int = 0                          # the last step that the checkpoint of a resumed run contains
    compared: bool = False                    # whether this rank has compared its weights with those of the other ranks
    hold: Callable[[], None] = lambda: None   # called before each event: does not return once the run ends

    def run(self) -> None:
        """Execute the whole plan."""
        self.run_items(self.items)

    def compare_weights(self) -> None:
        """Check, once, that all ranks have read the same weights: before the first step, or at the end on a rank that
        takes part in none. RL0769."""
        if not self.compared and dist.get_world_size() > 1:
            self.state.models.compare_weights()
        self.compared = True

    def run_items(self, items: Sequence[Item], iteration: int = 1) -> None:
        """Execute some items. iteration: of the innermost loop, from 1."""
        for item in items:
            if isinstance(item, Event):
                self.run_event(item)
            elif isinstance(item, When):
                if item.runs(iteration):
                    self.run_items(item.body, iteration)
            else:
                for i in self.iterate(item):
                    if self.depth == 1:
                        self.run_iteration(item.body, i)
                    else:
                        self.run_items(item.body, i)

    def run_iteration(self, items: Sequence[Item], iteration: int, blocks: tuple[When, ...] = ()) -> None:
        """Execute those items of the step loop that run in an iteration of it, each for its step. blocks: around the
        items."""
        for item in items:
            if isinstance(item, When):
                self.run_iteration(item.body, iteration, (*blocks, item))
            elif self.is_due(iteration, ahead_of(item), blocks):
                self.run_items([item], iteration)

    def is_due(self, iteration: int, ahead: int, blocks: Sequence[When] = ()) -> bool:
        """Whether items of the step loop that run so far ahead run in an iteration. A resumed run first repeats, of
        the iterations before its checkpoint, what they made of later steps, and what brings parameters to the copies.
        blocks: around the items, outermost first."""
        if ahead == EVERY_ITERATION and blocks:
            return any(self.is_due(iteration, a, blocks) for a in blocks[-1].aheads)
        repeats = bool(self.resumed) and iteration <= self.resumed
        return runs_in(iteration, ahead, self.state.context.plan.header.steps, blocks) and (
            not repeats or ahead == EVERY_ITERATION or iteration + max(ahead, 0) > self.resumed)

    def state_of(self, event: Event) -> RankState:
        """The state of the step for which an event runs now."""
        return replace(self.state, step=self.step_of(event)) if event.ahead > 0 else self.state

    def step_of(self, item: Item) -> StepState:
        """The step for which an item runs now."""
        ahead = ahead_of(item) if self.depth else 0
        return self.state.step.later(self.iteration + ahead) if ahead > 0 else self.state.step

    def handle(self, state: RankState, event: Event) -> None:
        """Execute one event, or restore what it did before the checkpoint of a resumed run."""
        resumed = state.services.resumed
        if resumed is not None and self.iteration <= self.resumed and in_flight.stored_values(event, state.context):
            in_flight.restore(state.step, event, resumed.rows_of)
        else:
            rule_for(HANDLERS, event, "the interpreter")(state, event)
        if event.ahead > 0 and state.services.writer is not None:
            in_flight.keep(state.step, event)

    def rewind(self, loop: Loop, checkpoint: LoadedCheckpoint) -> None:
        """Before the iterations that a resumed run repeats: the data is at the batches that they read. RL0762."""
        context, reader = self.state.context, self.state.services.data
        lag, steps = context.plan.header.lag, context.plan.header.steps
        begun = range(checkpoint.step + 1, min(checkpoint.step + lag, steps) + 1)
        if lag or checkpoint.steps_ahead:
            in_flight.check(checkpoint, begun, context)
        for number in begun:
            for source, batches in in_flight.batches_read(loop.body, number, checkpoint).items():
                reader.position[source] = reader.position.get(source, -1) - batches

    def run_event(self, event: Event) -> None:
        """Execute one event, and report and record how long it took."""
        state, services = self.state_of(event), self.state.services
        self.hold()
        services.ring.begin_event(event)
        services.reporter.begins(state.step, event)
        begin, waited = time.monotonic(), services.ring.waited
        with self.profiler.event(event, self.state.step.number) if self.profiler else nullcontext():
            self.handle(state, event)
        if self.recorder is not None:
            synchronize(state.context.device)
        end = time.monotonic()
        services.ring.end_event()
        services.reporter.took(state.step, event, end - begin)
        if self.recorder is not None:
            self.recorder.add(event, self.state.step.number, begin, end, services.ring.waited - waited)

    def iterate(self, loop: Loop) -> Iterator[int]:
        """The iterations of a loop, from 1; the caller runs the body of each. The outermost loop is the
        step loop: only loads come before it. What ends an iteration happens when the caller asks for the next one."""
        context, step = self.state.context, self.step_of(loop)
        outer, step.evaluated_source = (step.iteration, step.evaluated_source), loop.over
        for buffer in loop.collects:
            if context.holds(buffer):
                value_events.make_empty(step, buffer)
        self.depth += 1
        yield from self._steps(loop, step) if self.depth == 1 else self._inner_iterations(loop, step)
        self.depth -= 1
        self.state.services.ring.leave_loop(self.depth)
        step.iteration, step.evaluated_source = outer

    def _steps(self, loop: Loop, step: StepState) -> Iterator[int]:
        """The iterations of the step loop. A resumed run begins with some that its checkpoint contains, in which only
        what runs ahead is repeated: these neither begin nor end a step."""
        services = self.state.services
        self.compare_weights()
        self.resumed = step.number
        if services.resumed is not None:
            self.rewind(loop, services.resumed)
        for i in range(loop.first + step.number, loop.trips + 1):
            self._enter(step, i)
            self.iteration = i
            if i <= self.resumed:
                yield i
                continue
            step.begin()
            yield i
            end_step(step, services.reporter)
            if step.stopped:
                return
            if loop.until and i >= 1:
                step.ended = bool(step.buffers.get(loop.until).data)
                step.buffers.free(loop.until)
                if step.ended:
                    return

    def _inner_iterations(self, loop: Loop, step: StepState) -> Iterator[int]:
        """The iterations of a `repeat`, or of an `eval` over a data source. Ahead of the step loop, a resumed run makes
        as many as the run that wrote its checkpoint."""
        services, ahead = self.state.services, ahead_of(loop) > 0
        count = eval_loops.num_iterations(services.data, loop) if loop.over else loop.trips
        restored = 0  # iterations that the run made which wrote the checkpoint; 0: none did
        if ahead and services.resumed is not None and self.iteration <= self.resumed:
            restored = in_flight.iterations(services.resumed, step.number, loop)
        services.reporter.entered(loop.id)
        for i in range(loop.first, count + 1):
            self._enter(step, i)
            services.reporter.iterated(loop.id)
            yield i
            if loop.until:
                done = i == restored if restored else bool(step.buffers.get(loop.until).data)
                step.buffers.free(loop.until)
                if done:
                    break
        if ahead and services.writer is not None:
            in_flight.keep_iterations(step, loop, step.iteration + 1)

    def _enter(self, step: StepState, iteration: int) -> None:
        """Begin an iteration of the innermost loop."""
        step.iteration = iteration - 1
        self.state.services.ring.enter_iteration(self.depth - 1, iteration)


def execute(file: PlanFile, out: str | Path, device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
            watchdog: Watchdog | None = None, options: Options = Options(),  # noqa: B008 (immutable)
            run: Callable[[Interpreter], None] = Interpreter.run, begun: Callable[[], None] = lambda: None) -> None:
    """Run a plan as rank dist.get_rank().

    out: directory of what the run writes.
    run: executes the rank's events; an emitted program has its own function for it.
    begun: called by rank 0 once the directory belongs to this run.

    Everything that can be checked is checked before the first step: the plan, the data, the functions, the files.
    Errors: a Failure, with the codes of everything that is checked."""
    start = prepare(file, out, device, watchdog, options)
    context, step = start.context, start.step
    ring = EventRing() if watchdog is None else watchdog.ring
    first = step.number
    recorder = TimelineRecorder(context.rank, context.plan.header.devices_per_node,
                                Labels.of(context.plan.values, context.plan.frames)) if options.trace else None
    functions = called_functions(context, start.items)
    ring.begin_startup("loading the Python functions" if functions else "waiting for the start of all ranks")
    with (RewardPool(functions, options.reward_workers, options.reward_seconds, context.rank) as rewards,
          closing(Environments()) as environments):
        open_environments(context, start.data, start.items, environments, ring.begin_startup)
        if start.resumed is not None and context.rank == 0:
            environments.timeouts = start.resumed.timeouts
        begin_run(context, start.resumed, options, begun)
        if watchdog is not None:  # dumps are written to the directory of a run, which now exists
            watchdog.out = context.out
        with (Reporter(context, step, start.data, options.reporting) as reporter,
              run_record(context, step, file, options.reporting.command, options.continues,
                         environments) as interruption):
            if watchdog is not None:
                watchdog.interruption = interruption
            services = Services(start.data, rewards, reporter, ring, start.writer, start.resumed, environments)
            ring.begin_startup("reading the weights")
            state = RankState(context, ModelStore(context, reader=start.data), step, services)
            seconds = _run_events(state, start.items, device, recorder, watchdog, options, run)
            _finish(state)
    if context.rank == 0:
        for note in _notes_at_end(context, step, environments):
            print(note, file=sys.stderr, flush=True)
        steps = step.number - first
        write_summary(context.plan, context.out, summarize(context.plan, context.out, step.number, steps, seconds))


def _run_events(state: RankState, items: Sequence[Item], device: torch.device, recorder: TimelineRecorder | None,
                watchdog: Watchdog | None, options: Options, run: Callable[[Interpreter], None]) -> float:
    """All events of this rank, with a timeline and a profile where they are asked for. Returns the seconds that they
    took."""
    context = state.context
    begin = time.monotonic()
    profiler = EventProfiler(context, device, state.step.number, options.profile) if options.profile else None
    interpreter = Interpreter(state, items, recorder, profiler)
    if watchdog is not None:
        interpreter.hold = watchdog.hold_if_terminated
    run(interpreter)
    interpreter.compare_weights()
    if profiler is not None:
        profiler.close()
    seconds = time.monotonic() - begin
    if recorder is not None:
        write_timeline(recorder, context.plan, Path(str(options.trace)), device)
    return seconds


def _notes_at_end(context: RunContext, step: StepState, environments: Environments) -> Iterator[str]:
    """What a run says when it has ended: why it ended early, and what of it is not as it should be."""
    if step.stopped:
        yield f"stopped after step {step.number} as requested; use `--resume` to continue from there"
    if step.ended:
        until = next(x.until for x in context.plan.body if isinstance(x, Loop))
        yield f"ended after step {step.number}: {context.values[split_buffer(until)[0]].label}"
    if environments.errors:
        yield (f"{counted(environments.errors, 'conversation')} ended by an error of their environment "
               "(on_error=end): `gen.stopped` is 5")
    if environments.timeouts:
        yield (f"not exact: {counted(environments.timeouts, 'conversation')} ended after `turn_timeout` "
               "(on_error=end), so another run may compute other numbers")


def _finish(state: RankState) -> None:
    """Wait for all communication and for the last checkpoint, before the processes end."""
    state.step.buffers.wait_all()
    state.models.wait_all()
    state.services.reporter.write_lines(wait=True)
    state.step.sent_logs.finish()
    state.services.ring.finish()
    if state.services.writer is not None:
        state.services.writer.finish(state.context)
    if ends_late_conversations(state.context.plan):
        environments = state.services.environments
        environments.timeouts = sum_of_ranks(environments.timeouts, state.context.device)
        environments.errors = sum_of_ranks(environments.errors, state.context.device)
    dist.barrier()
