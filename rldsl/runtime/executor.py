"""A rank walks its own list of events; that is all.

In: the bytes of a plan, inside an initialised process group. Out: the run's files. The list is the plan's body filtered
to this rank; every wait is either inside an event or at the first read of what a transfer or a realloc brings.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.plan.events import (Checkpoint, Collect, Compute, Event, Every, Fetch, Free, Generate, Infer, Item, Lengths,
                               Load, Log, Loop, Offload, Onload, Realloc, Save, Select, Train, Transfer)
from rldsl.runtime import calls, values
from rldsl.runtime.checkpoint import checkpoint, finish
from rldsl.runtime.evaluations import turns
from rldsl.runtime.failure import Watch
from rldsl.runtime.log import end_step, log
from rldsl.runtime.metrics.record import clear
from rldsl.runtime.metrics.report import Report
from rldsl.runtime.options import Options
from rldsl.runtime.pool import Pool
from rldsl.runtime.save import save
from rldsl.runtime.start import functions, prepare, recorded
from rldsl.runtime.state import State
from rldsl.runtime.summary import summarise, write_summary
from rldsl.runtime.trace import Recorder, now, write
from rldsl.runtime.train import train

HANDLERS: Mapping[type[Event], Callable[[State, Event], None]] = {
    Load: calls.load, Fetch: values.fetch, Lengths: values.lengths, Transfer: values.move, Realloc: calls.reallocate,
    Offload: calls.offload, Onload: calls.onload, Generate: calls.generate, Infer: calls.infer, Train: train,
    Compute: values.compute, Select: values.select, Collect: values.collect, Save: save,
    Checkpoint: checkpoint, Log: log, Free: values.free,
}


def execute(data: bytes, name: str, out: str | Path, device: torch.device = torch.device("cpu"),
            watch: Watch | None = None, options: Options = Options()) -> None:
    """Run a plan as rank dist.get_rank(). name: of the plan file, for messages. out: directory of what the run writes.

    Everything that can be checked is checked before the first step: the plan, the data, the functions, the files."""
    state, own = prepare(data, name, out, device, watch, options)
    if options.overwrite and state.world.rank == 0:
        clear(state.out)
    dist.barrier()  # what is removed is gone for all
    begun_at = state.step
    recorder = Recorder(state.world.rank) if options.trace else None
    goes_on = options.again or options.resume is not None
    rewards = Pool(functions(state, own), options.reward_workers, options.reward_seconds, state.world.rank)
    with (rewards as state.rewards, Report(state, options.asked) as state.report,
          recorded(state, data, options.asked.command, goes_on)):
        begun = time.monotonic()
        _walk(state, own, watch, recorder)
        seconds = time.monotonic() - begun
        if recorder is not None:
            write(recorder, Path(str(options.trace)), device)
        _finish(state)
    if state.world.rank == 0:
        if state.stopped:
            print(f"stopped after step {state.step}, as asked; `--resume` goes on from there", file=sys.stderr,
                  flush=True)
        write_summary(state.plan, state.out, summarise(state.plan, state.out, state.step, state.step - begun_at, seconds))


def _walk(state: State, items: Sequence[Item], watch: Watch | None, recorder: Recorder | None, turn: int = 1,
          depth: int = 0) -> None:
    """turn: iteration of the innermost loop, from 1. depth: number of loops around."""
    for item in items:
        if isinstance(item, Event):
            if watch is not None:
                watch.at = item
            state.report.begins(item)
            begin = now()
            HANDLERS[type(item)](state, item)
            end = now()
            state.report.took(item, end - begin)
            if recorder is not None:
                recorder.add(item, state.step, begin, end)
        elif isinstance(item, Every):
            if turn % item.period == 0:
                _walk(state, item.body, watch, recorder, turn, depth)
        else:
            assert isinstance(item, Loop)
            _loop(state, item, watch, recorder, depth)


def _loop(state: State, loop: Loop, watch: Watch | None, recorder: Recorder | None, depth: int) -> None:
    outer, state.over = (state.turn, state.over), loop.over
    trips = turns(state, loop) if loop.over else loop.trips
    if depth:
        state.report.entered(loop.id)
    for buffer in loop.collects:
        if state.holds(buffer):
            values.empty(state, buffer)
    for i in range(1 + (state.step if depth == 0 else 0), trips + 1):
        state.turn = i - 1
        if depth == 0:
            state.begin_step()
        else:
            state.report.turned(loop.id)
        _walk(state, loop.body, watch, recorder, i, depth + 1)
        if depth == 0:
            end_step(state)
            if state.stopped:
                break
        if loop.until:
            enough = bool(state.store.take(loop.until).data)
            state.store.free(loop.until)
            if enough:
                break
    state.turn, state.over = outer


def _finish(state: State) -> None:
    """Nothing may be left on its way when the processes end."""
    state.store.settle()
    for key in list(state.arriving):
        state.settled(*key)
    if state.writer is not None:
        finish(state)
    dist.barrier()
