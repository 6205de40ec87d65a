"""The event `derive`: a frame made from another one, each rank on its own rows.

In: the state of a step. Out: the lengths of this rank's new rows, and a buffer for each value that comes along. An
operation says which rows its frame has and from which row of the source each comes (`OPS`); the rest is the same for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rldsl.plan.derive_ops import DeriveOpName
from rldsl.plan.events import Derive
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import RaggedRows


@dataclass(frozen=True, slots=True)
class DerivedRows:
    """The rows of a derived frame that this rank has."""

    rows: torch.Tensor  # [S] int64, ascending: of the derived frame, present ones alone
    source_rows: torch.Tensor  # [S] int64, ascending: the row of the source that each comes from


def derive(step: StepState, event: Derive) -> None:
    context = step.context
    source = context.frames[event.source]
    made = OPS[event.op](step, event)
    if event.makes_rows:
        step.rows.set_lengths(event.frame, _lengths(step, event, made))  # of this rank's rows, until the exchange
    for value, new in event.values:
        held: RaggedRows = step.read(event.reads, value)
        if context.values[value].extent == "prompt":
            kept = held.select((made.source_rows // source.per_prompt).unique())
        else:
            kept = held.select(made.source_rows)
            kept = RaggedRows(made.rows, kept.sizes, kept.data)
        step.buffers.put(f"{new}@{event.spread}", kept)


def _lengths(step: StepState, event: Derive, made: DerivedRows) -> RowLengths:
    """The lengths of the frame's rows: those of the rows that they come from, and 0 where a row is absent."""
    source, count = step.rows.lens[event.source], step.context.frames[event.frame].count
    prompt, response = (torch.zeros(count, dtype=x.dtype, device=x.device) for x in (source.prompt, source.response))
    prompt[made.rows], response[made.rows] = source.prompt[made.source_rows], source.response[made.source_rows]
    return RowLengths(prompt, response)


def _where(step: StepState, event: Derive) -> DerivedRows:
    """The rows whose condition holds, under the same numbers."""
    rows = step.my_rows(step.context.spreads[event.spread], event.source)
    kept = rows[step.read(event.reads, event.key).select(rows).data.to(torch.bool)]
    return DerivedRows(kept, kept)


def _restrict(step: StepState, event: Derive) -> DerivedRows:
    """The rows that the frame has already."""
    rows = step.my_rows(step.context.spreads[event.spread], event.frame)
    return DerivedRows(rows, rows)


OPS: Mapping[DeriveOpName, Callable[[StepState, Derive], DerivedRows]] = {"where": _where, "restrict": _restrict}
