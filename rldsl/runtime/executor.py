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

from rldsl.diag import fail
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.events import (Checkpoint, Collect, Compute, Event, Every, Fetch, Free, Generate, Infer, Item, Lengths, Load, Log,
                               Loop, Offload, Onload, Realloc, Save, Select, Train, Transfer)
from rldsl.plan.project import schedule
from rldsl.plan.verify import verify
from rldsl.runtime import calls, values
from rldsl.runtime.checkpoint import begin, checkpoint, facts, finish, found
from rldsl.runtime.failure import Watch
from rldsl.runtime.files import check_writable
from rldsl.runtime.log import METRICS, end_step, log
from rldsl.runtime.resume import Resume
from rldsl.runtime.resume import resume as read
from rldsl.runtime.save import save
from rldsl.runtime.state import State
from rldsl.runtime.summary import SUMMARY, summarise, write_summary
from rldsl.runtime.trace import Recorder, now, write
from rldsl.runtime.train import train
from rldsl.runtime.world import check_same_plan, join

HANDLERS: Mapping[type[Event], Callable[[State, Event], None]] = {
    Load: calls.load, Fetch: values.fetch, Lengths: values.lengths, Transfer: values.move, Realloc: calls.reallocate,
    Offload: calls.offload, Onload: calls.onload, Generate: calls.generate, Infer: calls.infer, Train: train,
    Compute: values.compute, Select: values.select, Collect: values.collect, Save: save,
    Checkpoint: checkpoint, Log: log, Free: values.free,
}


def execute(data: bytes, name: str, out: str | Path, device: torch.device = torch.device("cpu"),
            trace: str | None = None, watch: Watch | None = None, resume: str | Path | None = None,
            again: bool = False) -> None:
    """Run a plan as rank dist.get_rank(). name: of the plan file, for messages. trace: file for the timeline. resume: a
    checkpoint, or the directory of a run, to go on from. again: torchrun has started this run before, so a checkpoint of
    it is taken where there is one.

    Everything that can be checked is checked before the first step: the plan, the data, the functions."""
    plan = decode(data, name)
    verify(plan)
    check_same_plan(data, device)
    state = State(plan, join(plan, dist.get_rank(), device), _writable(out))
    own = schedule(plan.body, plan.meshes, state.world.rank)
    if any(isinstance(e, Checkpoint) for e in _events(own)):
        begin(state, plan_id(data), watch)
    state.resume = _resumed(state, resume, again)
    for kept in plan.states:
        if state.holds(f"{kept.value}@{kept.spread}"):
            at = torch.zeros(1, dtype=torch.int64, device=device)
            value = state.resume.states.get(kept.value, kept.initial) if state.resume else kept.initial
            state.write(kept.value, kept.spread, at, torch.tensor([value], dtype=torch.float64, device=device))
    recorder = Recorder(state.world.rank) if trace else None
    _check(state, own)
    _check_files(state, own, trace)
    begun = time.monotonic()
    _walk(state, own, watch, recorder)
    if recorder is not None:
        write(recorder, Path(trace), device)
    _finish(state, time.monotonic() - begun)


def _resumed(state: State, asked: str | Path | None, again: bool) -> Resume | None:
    """Where the run goes on; the state takes over the counts of that place."""
    if asked is None and found(state.out) and not again:
        raise fail("RL0763", "this directory holds the checkpoints of another run", place=str(state.out),
                   help="`--resume` goes on from the last one; `--out` names another directory")
    if asked is None and not found(state.out):
        return None
    held = read(Path(asked or state.out), facts(state.plan), state.device)
    state.step = held.step
    state.fetched.update(held.data)
    return held


def _writable(out: str | Path) -> Path:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail("RL0705", f"the output directory cannot be made: {error.strerror}", place=str(out)) from None
    return Path(out)


def _check(state: State, items: Sequence[Item]) -> None:
    """Open every data source and load every function that this rank will need."""
    from rldsl.runtime import reward

    for event in _events(items):
        if isinstance(event, Fetch):
            state.source(event.data)
        elif isinstance(event, Compute):
            for node in state.programs[event.program].nodes:
                if node.op == "py":
                    reward.load(state.functions[str(node.attr("function"))])
                    state.source(state.frames[str(node.attr("frame"))].data)  # its tokenizer makes the texts


def _check_files(state: State, items: Sequence[Item], trace: str | None) -> None:
    """That this rank can write the files that it will write."""
    rank = state.world.rank
    if any(isinstance(event, Log) and event.to == rank for event in _events(items)):
        check_writable(state.out / METRICS)
    if rank == 0:
        check_writable(state.out / SUMMARY)
        if trace:
            check_writable(Path(trace))


def _events(items: Sequence[Item]):
    for item in items:
        if isinstance(item, Event):
            yield item
        else:
            yield from _events(item.body)


def _walk(state: State, items: Sequence[Item], watch: Watch | None, recorder: Recorder | None, turn: int = 1,
          depth: int = 0) -> None:
    """turn: iteration of the innermost loop, from 1. depth: number of loops around."""
    for item in items:
        if isinstance(item, Event):
            if watch is not None:
                watch.at = item
            begin = now() if recorder is not None else 0.0
            HANDLERS[type(item)](state, item)
            if recorder is not None:
                recorder.add(item, state.step, begin, now())
        elif isinstance(item, Every):
            if turn % item.period == 0:
                _walk(state, item.body, watch, recorder, turn, depth)
        else:
            assert isinstance(item, Loop)
            _loop(state, item, watch, recorder, depth)


def _loop(state: State, loop: Loop, watch: Watch | None, recorder: Recorder | None, depth: int) -> None:
    outer = state.turn
    for buffer in loop.collects:
        if state.holds(buffer):
            values.empty(state, buffer)
    for i in range(1 + (state.step if depth == 0 else 0), loop.trips + 1):
        state.turn = i - 1
        if depth == 0:
            state.begin_step()
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
    state.turn = outer


def _finish(state: State, seconds: float) -> None:
    """Nothing may be left on its way when the processes end; then rank 0 writes the summary."""
    state.store.settle()
    for key in list(state.arriving):
        state.settled(*key)
    if state.writer is not None:
        finish(state)
    dist.barrier()
    if state.world.rank == 0:
        if state.stopped:
            print(f"stopped after step {state.step}, as asked; `--resume` goes on from there", file=sys.stderr, flush=True)
        write_summary(state.plan, state.out, summarise(state.plan, state.out, state.step, seconds))
