"""Before the first step: check everything that can be checked, and prepare the state of the rank.

In: a plan and the options of the run, inside an initialized process group. Out: the state to begin with, new or from a
checkpoint, and the items of the plan that this rank executes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic, Failure, fail
from rldsl.plan.disk_paths import shown
from rldsl.plan.events import Item
from rldsl.plan.model import Plan
from rldsl.plan.projection import schedule
from rldsl.plan.references import Role, references
from rldsl.runtime.comm.agreement import raise_together
from rldsl.runtime.comm.content_digests import compare_contents
from rldsl.runtime.comm.world import check_same_plan, join
from rldsl.runtime.files import check_writable, refuse_link_out, refuse_links_out
from rldsl.runtime.health.dump_files import remove_dumps
from rldsl.runtime.health.watchdog import Watchdog
from rldsl.runtime.interpreter.eval_loops import check_evaluations
from rldsl.runtime.interpreter.hub_copies import is_first_of_machine, with_local_copies
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.interpreter.plan_as_run import plan_as_run
from rldsl.runtime.interpreter.rank_inputs import events_of, open_sources, writes_checkpoints
from rldsl.runtime.interpreter.resumption import begin_row_states, begin_step, check_positions, resumed_checkpoint
from rldsl.runtime.metrics.run_record import WRITTEN, remove_earlier_run
from rldsl.runtime.metrics.summary import SUMMARY
from rldsl.runtime.metrics.writers import check_packages
from rldsl.runtime.persist.checkpoint_reader import LoadedCheckpoint, drop_later
from rldsl.runtime.persist.checkpoint_writer import CheckpointWriter, drop_unfinished, open_writer
from rldsl.runtime.plan_file import PlanFile
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.image_agreement import compare_image_files, decode_images
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
    plan = with_local_copies(plan_as_run(file.plan, file.name, out, device, options), watchdog)
    world = join(plan, dist.get_rank(), device, options.timeout)
    context = RunContext(plan, world, _writable(out), options.allow_write)
    items = schedule(plan.body, plan.meshes, context.rank)
    _check_models(plan, items)
    writer = open_writer(context, file.id, watchdog) if writes_checkpoints(items) else None
    resumed = resumed_checkpoint(context, options)
    step, reader = begin_step(context, resumed), DataReader(context)
    if resumed is not None:
        reader.position.update(resumed.data)
    note = (lambda what: None) if watchdog is None else watchdog.ring.begin_startup
    open_sources(context, reader, items, note)
    note("comparing the files of all ranks")
    compare_contents(reader.content_digests() if dist.get_world_size() > 1 else [], device)
    with_images = [d.name for d in plan.data if d.images]
    compare_image_files(reader.sources, with_images, device)
    if with_images and options.check_images:
        note("decoding all images")
        decode_images(reader.sources, with_images, device)
    check_positions(context, reader, resumed, writer is not None)
    begin_row_states(context, step, reader, resumed)
    check_evaluations(context, reader, items)
    _check_files(context, options)
    return Start(context, items, step, reader, writer, resumed)


def _verify_once(plan: Plan, device: torch.device) -> None:
    """Verify the plan on the first rank of each machine, and so with the version that is installed there: the others
    have the same bytes. Errors: of `verify`."""
    found: Sequence[Diagnostic] = ()
    if is_first_of_machine():
        try:
            verify(plan)
        except Failure as failure:
            found = failure.diagnostics
    raise_together(found, dist.group.WORLD, device)


def _check_models(plan: Plan, items: Sequence[Item]) -> None:
    """Check that the models of this rank are what the plan says, before any of their weights is read. A directory
    that is not there is left to the loader, which may not need it."""
    models = {r.id for event in events_of(items) for r in references(event) if r.role is Role.MODEL}
    if faults := check_model_tables(plan, models).faults:
        raise Failure(faults)


def _writable(out: str | Path) -> Path:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise fail("RL0705", f"the output directory cannot be created: {error.strerror}", place=str(out)) from None
    refuse_links_out(Path(out), WRITTEN)
    return Path(out)


def _check_files(context: RunContext, options: Options) -> None:
    """Check on rank 0 that the files to be written at the end can be written, and that optional packages exist."""
    if context.rank == 0:
        check_writable(context.out / SUMMARY)
        if options.trace:
            refuse_link_out(Path(options.trace), context.out)
            check_writable(Path(options.trace))
        check_packages(options.reporting.tensorboard, options.reporting.wandb, options.reporting.trackers)


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
