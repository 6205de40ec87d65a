"""States of the rows of a data source: draw, lookup, update.

A state of rows is a float32 array in host memory, one number per row of the source, on every rank that fetches from it.
Copies stay equal bit by bit: each new number comes from one rank, and all ranks write the same ones in the same order.
Errors: RL0759 rows cannot be drawn by their weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.diag import fail
from rldsl.plan.events import Draw, Lookup, Update, split_buffer
from rldsl.plan.expr import Program
from rldsl.plan.operators import in_family
from rldsl.runtime.data import Source
from rldsl.runtime.interpreter.expression_ops import elementwise
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.step import StepState
from rldsl.runtime.weighted_sample import sample_by_weight

BLOCK = 1 << 14  # rows that a weight is computed for at once: fewer than torch divides among threads


def draw(step: StepState, reader: DataReader, event: Draw) -> None:
    """The first participant draws the rows of the batch; the others receive their numbers."""
    context = step.context
    members = context.world.meshes[event.mesh].members()
    count = context.frames[event.frame].count
    rows = torch.empty(count, dtype=torch.int64, device=context.device)
    seed = step.sampling_seed(event.id, event.frame)
    if context.rank == members[0]:
        rows = _drawn(step, reader, event, count, seed).to(context.device)
    group = context.world.group(event.mesh)
    if group is not None:
        dist.broadcast(rows, src=members[0], group=group)
    value, spread = split_buffer(event.writes[0])
    step.write(value, spread, torch.arange(count, device=context.device), rows)


def _drawn(step: StepState, reader: DataReader, event: Draw, count: int, seed: int) -> Tensor:
    source = reader.source(event.data)
    inputs: dict[str, Tensor] = {name: _numbers(step, event, value) for name, value in event.inputs}
    inputs |= {name: reader.number_column(event.data, column) for name, column in event.columns}
    weights = row_weights(step.context.programs[event.program], inputs, len(source.table))
    _check_weights(weights, source, count, event)
    return torch.from_numpy(sample_by_weight(weights, count, seed, step.index))


def _numbers(step: StepState, event: Draw, value: str) -> Tensor:
    """A state of rows, or the number that another state has."""
    held = step.read(event.reads, value)
    return held if isinstance(held, Tensor) else held.data.cpu()


def row_weights(program: Program, inputs: Mapping[str, Tensor], count: int) -> np.ndarray:
    """[count] float32: the output of a program of elementwise operators for each row. inputs: one number for each row,
    or one for all."""
    blocks = [_weights(program, {name: x[a:a + BLOCK] if len(x) == count and len(x) > 1 else
                                 x if x.dtype == torch.bool else x.float()
                                 for name, x in inputs.items()}, min(BLOCK, count - a))
              for a in range(0, count, BLOCK)]
    return torch.cat(blocks).numpy()


def _weights(program: Program, inputs: Mapping[str, Tensor], count: int) -> Tensor:
    done: list[Tensor] = []
    for node in program.nodes:
        if node.op == "input":
            done.append(inputs[str(node.attr("name"))])
        elif in_family(node.op, "elementwise"):
            done.append(elementwise(node.op, [done[a] for a in node.args], torch.float32))
        else:
            value = node.attr("value")
            done.append(torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.float32))
    (_, index), = program.outputs
    return done[index].float().expand(count)


def _check_weights(weights: np.ndarray, source: Source, count: int, event: Draw) -> None:
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise fail("RL0759", f"a row of `{event.data}` has the weight {weights[wrong[0]]:g}", place=event.at,
                   notes=(f"the row at {source.table.place(int(wrong[0]))}",),
                   help="weights must be finite and at least 0, for example `weight=max(x, 0)`")
    positive = int((weights > 0).sum())
    if positive < count:
        raise fail("RL0759", f"a batch of `{event.data}` needs {count} rows with a weight above 0, but "
                   f"{'none has' if not positive else f'only {positive} have'} one", place=event.at,
                   notes=(f"the data has {len(weights)} rows",),
                   help="keep weights above 0, for example `weight=max(x, 0.01)`, or use a smaller `batch`")


def lookup(step: StepState, event: Lookup) -> None:
    numbers, table = step.read(event.reads, f"{event.frame}.row_numbers"), step.read(event.reads, event.state)
    value, spread = split_buffer(event.writes[0])
    step.write(value, spread, numbers.ids, table[numbers.data.cpu()].to(step.context.device))


def update(step: StepState, event: Update) -> None:
    new = step.read(event.reads, event.value)
    rows = step.read(event.reads, f"{event.frame}.row_numbers").select(new.ids).data
    table = step.read(event.reads, event.state).numpy()
    table[rows.cpu().numpy()] = new.data.cpu().numpy()  # in this order: of a row that is there twice the last stays
