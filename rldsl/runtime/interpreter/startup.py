"""Before the first step: check everything that can be checked, and prepare the state of the rank.

In: a plan and the options of the run, inside an initialized process group. Out: the state to begin with, new or from a
checkpoint, and the items of the plan that this rank executes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic, Failure, fail
from rldsl.models import hub, hub_adapters, hub_data
from rldsl.plan.disk_paths import paths, shown, text
from rldsl.plan.events import Checkpoint, Compute, Derive, Event, Fetch, Generate, Infer, Item, Train
from rldsl.plan.function import Function, frames_of_call
from rldsl.plan.model import Plan
from rldsl.plan.projection import schedule
from rldsl.plan.references import Role, references
from rldsl.runtime.comm.agreement import gather_texts, raise_together
from rldsl.runtime.comm.arithmetic import arithmetic, differences
from rldsl.runtime.comm.content_digests import compare_contents
from rldsl.runtime.comm.world import check_hosts, check_same_plan, gather_hosts, join
from rldsl.runtime.data.read_positions import (
    SourceReading,
    compare_images,
    compare_readings,
    unknown_position,
    unknown_source,
)
from rldsl.runtime.files import check_writable, refuse_link_out, refuse_links_out
from rldsl.runtime.health.dump_files import remove_dumps
from rldsl.runtime.health.watchdog import Watchdog
from rldsl.runtime.interpreter.conversations import Environments
from rldsl.runtime.interpreter.eval_loops import check_evaluations
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.message_file import report
from rldsl.runtime.metrics.run_record import (
    FAILED,
    FINISHED,
    STOPPED,
    WRITTEN,
    RunRecord,
    interruption_text,
    refuse_checkpoints,
    remove_earlier_run,
)
from rldsl.runtime.metrics.summary import SUMMARY
from rldsl.runtime.metrics.writers import check_packages
from rldsl.runtime.persist.allowed_paths import check_writes, with_python_as_it_is
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint, drop_later, load_checkpoint
from rldsl.runtime.persist.checkpoint_writer import CheckpointWriter, drop_unfinished, open_writer
from rldsl.runtime.persist.run_identity import program_identity
from rldsl.runtime.plan_file import PlanFile
from rldsl.runtime.state import carried
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.image_agreement import compare_image_files
from rldsl.runtime.state.replay import ReplayRows
from rldsl.runtime.state.step import StepState
from rldsl.verify import verify
from rldsl.verify.model_tables import check_model_tables

NO_LIMIT = timedelta(days=365)  # of NCCL, which has no way to say so


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank begins a run with, once everything has been checked."""

    context: RunContext               # the plan and the communicators
    items: Sequence[Item]             # the plan's body, filtered to this rank
    step: StepState                   # the step to resume after (0: none), and the plan's states
    data: DataReader                  # data sources, at the position to resume from
    writer: CheckpointWriter | None   # writes checkpoints; None if the plan makes none
    resumed: LoadedCheckpoint | None  # the checkpoint that the run resumes from; None if it starts anew


def prepare(file: PlanFile, out: str | Path, device: torch.device, watchdog: Watchdog | None,
            options: Options) -> Start:
    """Check everything that can be checked before the first step. All ranks call it together."""
    check_same_plan(file.data, device)
    _verify_once(file.plan, device)
    plan = _with_local_copies(_allowed(file.plan, file.name, out, device, options), watchdog)
    world = join(plan, dist.get_rank(), device, options.timeout)
    context = RunContext(plan, world, _writable(out), options.allow_write)
    items = schedule(plan.body, plan.meshes, context.rank)
    _check_models(plan, items)
    writer = open_writer(context, file.id, watchdog) if any(isinstance(e, Checkpoint) for e in _events(items)) else None
    resumed = _resumed(context, options)
    step, reader = StepState(context), DataReader(context)
    if resumed is not None:
        step.number = resumed.step
        reader.position.update(resumed.data)
        step.carried.update(carried.restored(context, resumed))
    for state in plan.states:
        if context.holds(f"{state.value}@{state.spread}") and not state.data:
            step.write_number(state.value, state.spread, resumed.states[state.value] if resumed else state.initial)
    for buffer in plan.buffers:
        if context.holds(f"{buffer.value}@{buffer.spread}"):
            rows = ReplayRows(buffer)
            if resumed is not None:
                resumed.fill_buffer(rows)
            step.buffers.put(f"{buffer.value}@{buffer.spread}", rows)
    note = (lambda what: None) if watchdog is None else watchdog.ring.begin_startup
    _open_sources(context, reader, items, note)
    note("comparing the files of all ranks")
    compare_contents(reader.content_digests() if dist.get_world_size() > 1 else [], device)
    compare_image_files(reader.sources, [d.name for d in plan.data if d.images], device)
    _check_positions(context, reader, resumed, writer is not None)
    _begin_row_states(context, step, reader, resumed)
    check_evaluations(context, reader, items)
    _check_files(context, options)
    return Start(context, items, step, reader, writer, resumed)


def _verify_once(plan: Plan, device: torch.device) -> None:
    """Verify the plan on the first rank of each machine, and so with the version that is installed there: the others
    have the same bytes. Errors: of `verify`."""
    found: Sequence[Diagnostic] = ()
    if _is_first_of_machine():
        try:
            verify(plan)
        except Failure as failure:
            found = failure.diagnostics
    raise_together(found, dist.group.WORLD, device)


def _is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _with_local_copies(plan: Plan, watchdog: Watchdog | None) -> Plan:
    """Models, adapters and data of the Hub by their directories in the cache of this node; its first rank downloads
    what is missing there."""
    models, data = sorted({m.path for m in plan.models}), sorted({d.path for d in plan.data if d.format == "hf"})
    adapters = sorted({m.lora.path for m in plan.models if m.lora is not None and m.lora.path})
    if not any(path.startswith(hub.PREFIX) for path in (*models, *adapters, *data)):
        return plan
    if watchdog is not None:
        watchdog.ring.begin_startup("downloading from the Hub")

    def local() -> dict[str, str]:
        return {path: str(hub_adapters.directory(path)) for path in adapters} | {
            path: hub.download(path) for path in models} | {path: hub_data.download(path) for path in data}

    if _is_first_of_machine():
        local()
    if dist.get_world_size() > 1:
        dist.barrier()
    return cast(Plan, _with_paths(plan, local()))


def _with_paths(part: object, new: Mapping[str, str]) -> object:
    """A part of a plan with other paths, wherever it has them: data and buffers name the tokenizers of models."""
    if isinstance(part, str):
        return new.get(part, part)
    if isinstance(part, tuple):
        return tuple(_with_paths(x, new) for x in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _with_paths(getattr(part, f.name), new) for f in fields(part) if f.init})
    return part


def _check_models(plan: Plan, items: Sequence[Item]) -> None:
    """Check that the models of this rank are what the plan says, before any of their weights is read. A directory
    that is not there is left to the loader, which may not need it."""
    models = {r.id for event in _events(items) for r in references(event) if r.role is Role.MODEL}
    if faults := check_model_tables(plan, models).faults:
        raise Failure(faults)


def _resumed(context: RunContext, options: Options) -> LoadedCheckpoint | None:
    """The checkpoint that the run resumes from."""
    if options.resume is None:
        if not (options.overwrite or options.continues):
            refuse_checkpoints(context.out)
        return None
    checkpoint = load_checkpoint(Path(options.resume), program_identity(context.plan), context.device)
    lacking = [m.name for m in context.plan.models if (m.train_layout or m.updated_from) and not checkpoint.has(m.name)]
    lacking += [s.value for s in context.plan.states
                if s.value not in (checkpoint.names if s.data else checkpoint.states)]
    lacking += [b.value for b in context.plan.buffers if b.value not in checkpoint.names]
    if lacking:
        raise fail("RL0762", f"the checkpoint does not contain `{'`, `'.join(lacking)}`", place=str(checkpoint.path),
                   notes=(f"it contains {', '.join([*checkpoint.names, *checkpoint.states])}",),
                   help="resume with the program that wrote it, or start a new run with another `--out`")
    for buffer in context.plan.buffers:
        if not checkpoint.has_buffer(buffer):
            raise fail("RL0762", f"the rows of `{buffer.value}` have other values in the checkpoint",
                       place=str(checkpoint.path),
                       notes=(f"there they have {', '.join(checkpoint.fields_of_buffer(buffer))}; "
                              f"the program keeps {', '.join(f.name for f in buffer.fields)}",),
                       help="resume with the program that wrote it, or start a new run with another `--out`")
    return checkpoint


def _check_positions(context: RunContext, reader: DataReader, checkpoint: LoadedCheckpoint | None,
                     writes: bool) -> None:
    """Check that the data positions in the checkpoint still refer to the same rows, report what is odd about the rows,
    and note how each source is read for the next checkpoint. writes: whether this run writes checkpoints. All ranks
    call it together."""
    comparisons: list[Diagnostic | None] = []
    if checkpoint:  # of sources that the program no longer has: their positions are kept, so is what these mean
        kept = checkpoint.readings.keys() - {d.name for d in context.plan.data}
        reader.readings.update({name: checkpoint.readings[name] for name in kept})
    for name, source in reader.sources.items():
        if reader.reports(name) and (checkpoint or writes):
            now = reader.readings[name] = SourceReading.of(source, reader.digests.get(name, ""))
            if checkpoint and name in checkpoint.readings:
                then, begun = checkpoint.readings[name], name in checkpoint.data
                comparisons.append(compare_readings(name, then, now, begun,
                                                    any(s.data == name for s in context.plan.states)))
                comparisons.append(compare_images(source, then, now, begun))
            elif checkpoint:
                comparisons.append(unknown_position(name, now) if name in checkpoint.data else
                                   unknown_source(name, now))
    problems = [d for d in comparisons if d is not None]
    problems += [warning for name, source in reader.sources.items() if reader.reports(name)
                 for warning in source.warnings]
    errors = [d for d in problems if d.severity == "error"]
    if warnings := [d for d in problems if d not in errors]:
        report(warnings)
    raise_together(errors, dist.group.WORLD, context.device)


def _begin_row_states(context: RunContext, step: StepState, reader: DataReader,
                      checkpoint: LoadedCheckpoint | None) -> None:
    """The states of rows that this rank holds: those of the checkpoint, or their initial numbers."""
    for state in context.plan.states:
        if state.data and context.holds(f"{state.value}@{state.spread}"):
            numbers = torch.full((len(reader.source(state.data).table),), state.initial, dtype=torch.float32,
                                 device="cpu")
            if checkpoint is not None:
                checkpoint.fill_row_state(state.value, numbers)
            step.buffers.put(f"{state.value}@{state.spread}", numbers)


def begin_run(context: RunContext, checkpoint: LoadedCheckpoint | None, options: Options,
              begun: Callable[[], None]) -> None:
    """All checks have passed: rank 0 removes from the directory what is not of this run, and calls `begun`. All ranks
    call it together."""
    dist.barrier()  # the checks of all ranks have passed
    if context.rank == 0:
        remove_dumps(context.out)
        if options.overwrite:
            remove_earlier_run(context.out, dist.get_world_size())
        drop_unfinished(context.out)
        if checkpoint is not None:
            drop_later(context.out, checkpoint)
            is_last = checkpoint.step >= context.plan.header.steps
            more = "which is the last step" if is_last else f"after step {checkpoint.step}"
            notes = (f"note: changed since the checkpoint: {shown(change)}" for change in checkpoint.changes)
            print("\n".join([f"resuming from {checkpoint.path}, {more}", *notes]), file=sys.stderr, flush=True)
        begun()
    dist.barrier()  # no rank writes before everything is removed
    if context.device.type == "cuda":
        # NCCL would count the time of a message from when it is posted, which may be a long call before its peer gets
        # there. From now on the watchdog judges who waits too long
        dist.distributed_c10d._set_pg_timeout(NO_LIMIT, dist.group.WORLD)


def _allowed(plan: Plan, name: str, out: str | Path, device: torch.device, options: Options) -> Plan:
    """The plan as this run executes it, after checking that it fits the machines and writes only to allowed paths; rank
    0 prints what it reads and writes."""
    found = [check_hosts(plan, gather_hosts(socket.gethostname(), device), name),
             differences(gather_texts(arithmetic(device, [x.backend for x in plan.layouts]), device))]
    check_writes(plan, Path(out), options.allow_write)
    changed: tuple[str, ...] = ()
    if options.changed_python:
        plan, changed = with_python_as_it_is(plan)
    if dist.get_rank() == 0:
        notes = [*filter(None, found), *(f"{path} changed since the plan was compiled" for path in changed)]
        print("\n".join([text(paths(plan), str(out)), *(f"note: {n}" for n in notes)]), file=sys.stderr, flush=True)
    return plan


def _writable(out: str | Path) -> Path:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail("RL0705", f"the output directory cannot be created: {error.strerror}", place=str(out)) from None
    refuse_links_out(Path(out), WRITTEN)
    return Path(out)


def _open_sources(context: RunContext, reader: DataReader, items: Sequence[Item], note: Callable[[str], None]) -> None:
    """Open every data source that this rank will need. note: called with each before it is opened."""
    for name in dict.fromkeys(_sources(context, items)):
        note(f"opening the data source `{name}`")
        reader.source(name)
    for frame in dict.fromkeys(_texts(context, items)):
        note(f"opening the tokenizer of `{frame}`")
        reader.tokens(context.frames[frame])


def _sources(context: RunContext, items: Sequence[Item]) -> Iterator[str]:
    for event in _events(items):
        if isinstance(event, Fetch):
            yield event.data
    for frame in _texts(context, items):
        if not context.frames[frame].tokenizer:
            yield context.frames[frame].data  # its tokenizer makes the texts
    if any(isinstance(event, Generate | Infer | Train) for event in _events(items)):  # models read images themselves
        yield from (data.name for data in context.plan.data if data.images)


def _texts(context: RunContext, items: Sequence[Item]) -> Iterator[str]:
    """The frames whose tokens become text on this rank, or are made of it."""
    for event in _events(items):
        if isinstance(event, Generate) and event.conversation is not None:
            yield event.frame
        if isinstance(event, Derive) and event.function:
            yield event.frame
            yield from (frame for _, frame in event.given)
        elif isinstance(event, Compute):
            for node in context.programs[event.program].nodes:
                if node.op == "py":
                    yield from (frame for _, frame in frames_of_call(node.attrs))


def called_functions(context: RunContext, items: Sequence[Item]) -> list[Function]:
    """The users' functions that this rank calls."""
    called = [str(node.attr("function")) for event in _events(items) if isinstance(event, Compute)
              for node in context.programs[event.program].nodes if node.op == "py"]
    called += [event.function for event in _events(items) if isinstance(event, Derive) and event.function]
    return [context.functions[name] for name in dict.fromkeys(called)]


def ends_late_conversations(plan: Plan) -> bool:
    """Whether a time limit may end a conversation, so that the clock decides what is trained on."""
    return any(isinstance(e, Generate) and e.conversation is not None and e.conversation.on_error == "end"
               for e in _events(plan.body))


def open_environments(context: RunContext, reader: DataReader, items: Sequence[Item], environments: Environments,
                      note: Callable[[str], None]) -> None:
    """Open the environments of this rank: what is wrong with them ends the run before it trains. note: called with
    each before it is opened."""
    for event in _events(items):
        if isinstance(event, Generate) and event.conversation is not None:
            functions = [context.functions[id] for id in event.conversation.environments]
            frame = context.frames[event.frame]
            axes = context.world.axes(context.world.layouts[event.layout])
            if not axes.talks:
                continue
            note(f"opening the environment {', '.join(f'`{f.name}`' for f in functions)}")
            rows = reader.source(frame.data) if axes.dp.index == 0 else None  # other ranks read the same
            environments.open(event.id, functions, event.conversation, event.sampling, reader.tokens(frame),
                              context.rank, rows, event.at)


def _check_files(context: RunContext, options: Options) -> None:
    """Check on rank 0 that the files to be written at the end can be written, and that optional packages exist."""
    if context.rank == 0:
        check_writable(context.out / SUMMARY)
        if options.trace:
            refuse_link_out(Path(options.trace), context.out)
            check_writable(Path(options.trace))
        check_packages(options.reporting.tensorboard, options.reporting.wandb, options.reporting.trackers)


def _events(items: Sequence[Item]) -> Iterator[Event]:
    for item in items:
        if isinstance(item, Event):
            yield item
        else:
            yield from _events(item.body)


@contextmanager
def run_record(context: RunContext, step: StepState, file: PlanFile, command: Sequence[str],
               continues: bool, environments: Environments) -> Iterator[Callable[[str], str] | None]:
    """Rank 0 keeps the record of the run: how it began, how it ended, and whether the clock decided anything. Yields,
    on rank 0, a function that ends the record after a signal ("interrupted", "terminated") and returns the line that
    says how to resume."""
    if context.rank != 0:
        yield None
        return
    cuda = context.device.type == "cuda"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"]
    record = RunRecord(context.out, file, context.plan, devices, command, continues)

    def exact(ended: bool) -> bool | None:
        if environments.timeouts:
            return False
        return True if ended or not ends_late_conversations(context.plan) else None  # other ranks may know of some

    def interruption(what: str) -> str:
        with suppress(Failure):
            record.end(STOPPED, step.number, exact(False))
        return interruption_text(context.out, step.number, context.plan.header.steps, command, what)

    try:
        yield interruption
    except BaseException as error:
        with suppress(Failure):  # if the disk is full, report the first error, not that the record was not written
            record.end(STOPPED if isinstance(error, KeyboardInterrupt) else FAILED, step.number, exact(False))
        raise
    record.end(STOPPED if step.stopped else FINISHED, step.number, exact(True))
