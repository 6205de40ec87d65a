"""Before the first step: a rank finds that it can run the plan, or says why not.

In: the bytes of a plan and the options of the run, inside an initialised process group. Out: the state to begin with,
fresh or from a checkpoint, and the rank's own list of items.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.diag import Failure, fail
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.disk_paths import paths, shown, text
from rldsl.plan.events import Checkpoint, Compute, Event, Fetch, Item
from rldsl.plan.model import Function, Plan
from rldsl.plan.projection import schedule
from rldsl.report import render
from rldsl.runtime.comm.agreement import agree
from rldsl.runtime.comm.world import check_hosts, check_same_plan, hosts, join
from rldsl.runtime.data.read_positions import Reading, compare, unknown
from rldsl.runtime.files import check_writable
from rldsl.runtime.health.dump_files import forget
from rldsl.runtime.health.watchdog import Watch
from rldsl.runtime.interpreter.eval_loops import check_evaluations
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.interpreter.state import State
from rldsl.runtime.metrics.run_record import FAILED, FINISHED, STOPPED, Record, clear, refuse_checkpoints
from rldsl.runtime.metrics.summary import SUMMARY
from rldsl.runtime.metrics.writers import check_packages
from rldsl.runtime.persist.allowed_paths import check_writes, with_python_as_it_is
from rldsl.runtime.persist.checkpoint_reader import Resume, drop_later, resume
from rldsl.runtime.persist.checkpoint_writer import begin, drop_unfinished
from rldsl.runtime.persist.run_identity import facts
from rldsl.verify import verify


def prepare(data: bytes, name: str, out: str | Path, device: torch.device, watch: Watch | None,
            options: Options) -> tuple[State, Sequence[Item]]:
    plan = decode(data, name)
    verify(plan)
    check_same_plan(data, device)
    plan = _allowed(plan, name, out, device, options)
    state = State(plan, join(plan, dist.get_rank(), device, options.timeout), _writable(out))
    state.allow_write = options.allow_write
    own = schedule(plan.body, plan.meshes, state.world.rank)
    if any(isinstance(e, Checkpoint) for e in _events(own)):
        begin(state, plan_id(data), watch)
    state.resume = _resumed(state, options)
    for kept in plan.states:
        if state.holds(f"{kept.value}@{kept.spread}"):
            at = torch.zeros(1, dtype=torch.int64, device=device)
            value = state.resume.states[kept.value] if state.resume else kept.initial
            state.write(kept.value, kept.spread, at, torch.tensor([value], dtype=torch.float64, device=device))
    _check(state, own)
    _check_positions(state)
    check_evaluations(state, own)
    _check_files(state, options)
    return state, own


def _resumed(state: State, options: Options) -> Resume | None:
    """Where the run goes on; the state takes over the counts of that place."""
    if options.resume is None:
        if not (options.overwrite or options.goes_on):
            refuse_checkpoints(state.out)
        return None
    held = resume(Path(options.resume), facts(state.plan), state.device)
    lacking = [m.name for m in state.plan.models if (m.home or m.sources) and not held.has(m.name)]
    lacking += [s.value for s in state.plan.states if s.value not in held.states]
    if lacking:
        raise fail("RL0762", f"the checkpoint does not hold `{'`, `'.join(lacking)}`", place=str(held.path),
                   notes=(f"it holds {', '.join([*held.names, *held.states])}",),
                   help="go on with the program that made it, or start a new run with another `--out`")
    state.step = held.step
    state.fetched.update(held.data)
    return held


def _check_positions(state: State) -> None:
    """That the positions of the checkpoint mean what they meant; how each source is read is noted for the next one.
    All ranks call it together."""
    held, found = state.resume, []
    for name in state.sources:
        if state.tells(name) and (held or state.writer):
            now = state.readings[name] = Reading.of(state.sources[name])
            if held and name in held.readings:
                found.append(compare(name, held.readings[name], now, name in held.data))
            elif held and name not in held.data:
                found.append(unknown(name, now))
    told = [d for d in found if d is not None]
    errors = [d for d in told if d.severity == "error"]
    if warnings := [d for d in told if d not in errors]:
        print(render(warnings, sys.stderr.isatty()), file=sys.stderr, flush=True)
    agree(errors, dist.group.WORLD, state.device)


def settle(state: State, options: Options, begun: Callable[[], None]) -> None:
    """The run is sound: what is in its directory and is not of it goes, and rank 0 says that it has `begun`. All ranks
    call it together."""
    held = state.resume
    dist.barrier()  # no rank has found a reason not to begin
    if state.world.rank == 0:
        forget(state.out)
        if options.overwrite:
            clear(state.out, dist.get_world_size())
        drop_unfinished(state.out)
        if held is not None:
            drop_later(state.out, held)
            more = f"after step {held.step}" if held.step < state.plan.header.steps else "where nothing is left to do"
            notes = (f"note: since it was made, {shown(change)}" for change in held.changes)
            print("\n".join([f"goes on from {held.path}, {more}", *notes]), file=sys.stderr, flush=True)
        begun()
    dist.barrier()  # what is removed is gone for all


def _allowed(plan: Plan, name: str, out: str | Path, device: torch.device, options: Options) -> Plan:
    """The plan as this run executes it, once it is known to fit the machines and to write nowhere else; the first rank
    shows what it touches."""
    note = check_hosts(plan, hosts(socket.gethostname(), device), name)
    check_writes(plan, Path(out), options.allow_write)
    changed: tuple[str, ...] = ()
    if options.changed_python:
        plan, changed = with_python_as_it_is(plan)
    if dist.get_rank() == 0:
        notes = [*([note] if note else []), *(f"{path} changed since the plan was compiled" for path in changed)]
        print("\n".join([text(paths(plan), str(out)), *(f"note: {n}" for n in notes)]), file=sys.stderr, flush=True)
    return plan


def _writable(out: str | Path) -> Path:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail("RL0705", f"the output directory cannot be made: {error.strerror}", place=str(out)) from None
    return Path(out)


def _check(state: State, items: Sequence[Item]) -> None:
    """Open every data source that this rank will need."""
    for event in _events(items):
        if isinstance(event, Fetch):
            state.source(event.data)
        elif isinstance(event, Compute):
            for node in state.programs[event.program].nodes:
                if node.op == "py":
                    state.source(state.frames[str(node.attr("frame"))].data)  # its tokenizer makes the texts


def functions(state: State, items: Sequence[Item]) -> list[Function]:
    """The users' functions that this rank calls."""
    called = [str(node.attr("function")) for event in _events(items) if isinstance(event, Compute)
              for node in state.programs[event.program].nodes if node.op == "py"]
    return [state.functions[name] for name in dict.fromkeys(called)]


def _check_files(state: State, options: Options) -> None:
    """That rank 0 can write the files that it will write at the end, and has the packages for others."""
    if state.world.rank == 0:
        check_writable(state.out / SUMMARY)
        if options.trace:
            check_writable(Path(options.trace))
        check_packages(options.asked.tensorboard, options.asked.wandb)


def _events(items: Sequence[Item]) -> Iterator[Event]:
    for item in items:
        if isinstance(item, Event):
            yield item
        else:
            yield from _events(item.body)


@contextmanager
def recorded(state: State, data: bytes, command: Sequence[str], goes_on: bool) -> Iterator[None]:
    """Rank 0 keeps the record of the run: how it began, and how it ended."""
    if state.world.rank != 0:
        yield
        return
    cuda = state.device.type == "cuda"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"]
    record = Record(state.out, state.plan, data, devices, command, goes_on)
    try:
        yield
    except BaseException as error:
        with suppress(Failure):  # a full disk has been told already: the first error is the one that counts
            record.end(STOPPED if isinstance(error, KeyboardInterrupt) else FAILED, state.step)
        raise
    record.end(STOPPED if state.stopped else FINISHED, state.step)
