"""The events `store` and `sample`, of replay buffers."""

from __future__ import annotations

import numpy as np
import torch

from rldsl.diag import fail
from rldsl.plan.events import Sample, Store, split_buffer
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.interpreter.row_states import row_weights
from rldsl.runtime.state.replay import ReplayRows
from rldsl.runtime.state.step import StepState
from rldsl.sharding.partition import present_rows


def store(step: StepState, event: Store) -> None:
    """Add the rows of a frame, in ascending order; every rank adds all of them."""
    context, lens = step.context, step.rows.lens
    frame = context.frames[event.frame]
    lengths = {frame.present_in: lens[frame.present_in].to_list("tokens")} if frame.present_in else {}
    rows = torch.tensor(present_rows(frame, lengths), dtype=torch.int64, device=context.device)
    kept: ReplayRows = step.read(event.reads, event.buffer)
    kept.add(lens[frame.id].prompt[rows].tolist(), lens[frame.id].response[rows].tolist(),
             {field: step.read(event.reads, value).select(rows) for value, field in event.values})


def sample(step: StepState, event: Sample) -> None:
    """Draw rows: every participant the same ones. Errors: RL0738 for a weight that is negative or not finite."""
    context = step.context
    frame, spread = context.frames[event.frame], split_buffer(event.writes[0])[1]
    kept: ReplayRows = step.read(event.reads, event.buffer)
    weights = _weights(step, event, kept)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise fail("RL0738", f"a row of `{event.buffer}` has the weight {weights[wrong[0]]:g}", place=event.at,
                   notes=(f"{len(wrong)} of its {len(weights)} rows have a weight that is negative or not finite",),
                   help="weights must be finite and at least 0, for example `weight=max(x, 0)`: a row with weight 0 is "
                        "never drawn")
    drawn = kept.draw(frame.count, weights, step.sampling_seed(event.id, event.frame), step.index)
    absent = [0] * (frame.count - len(drawn))
    step.set_lengths(event.frame, RowLengths.of_host([*(row.prompt for row in drawn), *absent],
                                                     [*(row.response for row in drawn), *absent], context.device))
    for field, value in event.values:
        step.buffers.put(f"{value}@{spread}", kept.ragged(field, drawn, context.device))


def _weights(step: StepState, event: Sample, kept: ReplayRows) -> np.ndarray:
    """[rows] of all rows of the buffer."""
    if not event.program or not kept.rows:
        return np.ones(len(kept.rows))
    inputs: dict[str, torch.Tensor] = {name: step.read(event.reads, value).data.cpu() for name, value in event.inputs}
    inputs |= {name: kept.numbers(field) for name, field in event.fields}
    return row_weights(step.context.programs[event.program], inputs, len(kept.rows))
