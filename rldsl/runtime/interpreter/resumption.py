"""The checkpoint that a run resumes from, and what it says of data and states.

In: the options of the run, the plan, its data sources. Out: the checkpoint, checked to hold all that
the plan needs; states and replay buffers as it has them, or new.
Errors: RL0762 the checkpoint lacks a part of the program; RL0764 a data position would mean other rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic, fail
from rldsl.runtime.comm.agreement import raise_together
from rldsl.runtime.data.read_positions import (
    SourceReading,
    compare_images,
    compare_readings,
    unknown_position,
    unknown_source,
)
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.message_file import report
from rldsl.runtime.metrics.run_record import refuse_checkpoints
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint, load_checkpoint
from rldsl.runtime.persist.run_identity import program_identity
from rldsl.runtime.state import carried
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.replay import ReplayRows
from rldsl.runtime.state.step import StepState


def resumed_checkpoint(context: RunContext, options: Options) -> LoadedCheckpoint | None:
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


def begin_step(context: RunContext, checkpoint: LoadedCheckpoint | None) -> StepState:
    """The state of the last step before this run: its number, what it carries over, and the plan's states and replay
    buffers, from the checkpoint or with their initial numbers."""
    step = StepState(context)
    if checkpoint is not None:
        step.number = checkpoint.step
        step.carried.update(carried.restored(context, checkpoint))
    for state in context.plan.states:
        if context.holds(f"{state.value}@{state.spread}") and not state.data:
            step.write_number(state.value, state.spread,
                              checkpoint.states[state.value] if checkpoint else state.initial)
    for buffer in context.plan.buffers:
        if context.holds(f"{buffer.value}@{buffer.spread}"):
            rows = ReplayRows(buffer)
            if checkpoint is not None:
                checkpoint.fill_buffer(rows)
            step.buffers.put(f"{buffer.value}@{buffer.spread}", rows)
    return step


def check_positions(context: RunContext, reader: DataReader, checkpoint: LoadedCheckpoint | None,
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


def begin_row_states(context: RunContext, step: StepState, reader: DataReader,
                      checkpoint: LoadedCheckpoint | None) -> None:
    """The states of rows that this rank holds: those of the checkpoint, or their initial numbers."""
    for state in context.plan.states:
        if state.data and context.holds(f"{state.value}@{state.spread}"):
            numbers = torch.full((len(reader.source(state.data).table),), state.initial, dtype=torch.float32,
                                 device="cpu")
            if checkpoint is not None:
                checkpoint.fill_row_state(state.value, numbers)
            step.buffers.put(f"{state.value}@{state.spread}", numbers)
