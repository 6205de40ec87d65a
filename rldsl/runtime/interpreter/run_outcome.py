"""The record of a run, kept by rank 0: how it began, how it ended, and whether the clock decided anything.

In: the run's context and state. Out: the record in the directory of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from rldsl.diag import Failure
from rldsl.runtime.interpreter.conversations import Environments
from rldsl.runtime.interpreter.rank_inputs import ends_late_conversations
from rldsl.runtime.metrics.run_record import FAILED, FINISHED, STOPPED, RunRecord, interruption_text
from rldsl.runtime.plan_file import PlanFile
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.step import StepState


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
