"""Events on values: fetch, lengths, transfer, compute, collect, free."""

from __future__ import annotations

from typing import Any, cast

import torch

from rldsl.diag import present
from rldsl.plan.arrays import HEAD
from rldsl.plan.arrays import tokens as longest_row
from rldsl.plan.events import Collect, Compute, Fetch, Free, Lengths, Transfer, split_buffer
from rldsl.plan.expr import Node
from rldsl.plan.function import frames_of_call
from rldsl.plan.model import INDEX
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.comm.exchange import DTYPES, message_tag, transfer
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.data.row_views import numbers_of
from rldsl.runtime.health.event_ring import EventRing
from rldsl.runtime.image_tokens import ids_of
from rldsl.runtime.interpreter.eval_loops import next_rows
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.python_rows import python_rows
from rldsl.runtime.interpreter.ragged_index import FrameRows
from rldsl.runtime.rewards.pool import RewardPool
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState
from rldsl.runtime.state.turns import unmarked
from rldsl.runtime.store import Pending, RaggedRows
from rldsl.sharding.layout import coordinate


def fetch(step: StepState, reader: DataReader, event: Fetch) -> None:
    """The next rows of a data source, or those that were drawn. Every participant reads and tokenizes the same ones;
    nothing is sent."""
    context = step.context
    numbers = _row_numbers(step, reader, event)
    source = reader.source(event.data)
    spreads = dict(split_buffer(b) for b in event.writes)
    data = context.data[event.data]
    for frame, fetched in zip(event.frames, source.read(numbers).values(), strict=True):
        absent = [0] * (context.frames[frame].count - len(fetched.tokens))  # the last rows of a short batch
        step.set_lengths(frame, RowLengths.of_host([*fetched.prompt_lens, *absent], [*fetched.response_lens, *absent],
                                                   context.device))
        if f"{frame}.tokens" in spreads:
            ids = torch.arange(len(fetched.tokens), device=context.device)
            step.write(f"{frame}.tokens", spreads[f"{frame}.tokens"], ids,
                       torch.cat(fetched.tokens).to(context.device))
        for number in data.numbers:
            if f"{frame}.{number}" in spreads:
                of_rows = numbers_of(source.table.read(numbers), number, data.answers)
                ids = torch.arange(len(of_rows), device=context.device)
                step.write(f"{frame}.{number}", spreads[f"{frame}.{number}"], ids,
                           torch.tensor(of_rows, device=context.device))
        if f"{frame}.{INDEX}" in spreads:
            ids = torch.arange(len(fetched.tokens), device=context.device)
            step.write(f"{frame}.{INDEX}", spreads[f"{frame}.{INDEX}"], ids, (ids % data.answers).float())
        if f"{frame}.columns" in spreads:
            step.buffers.put(f"{frame}.columns@{spreads[f'{frame}.columns']}", source.whole(numbers))
        if f"{frame}.row_numbers" in spreads:
            ids = torch.arange(len(numbers), device=context.device)
            step.write(f"{frame}.row_numbers", spreads[f"{frame}.row_numbers"], ids,
                       torch.tensor(numbers, dtype=torch.int64, device=context.device))


def _row_numbers(step: StepState, reader: DataReader, event: Fetch) -> list[int]:
    """The rows of the batch: those that were drawn, the next ones of the source, or those of this step and of the steps
    before it, as far as there were any."""
    if event.newest:
        source, newest = reader.source(event.data), step.batches[event.newest]
        count = step.context.frames[event.frames[0]].iterations
        earlier = (newest - age * event.stride for age in range(count))
        return [row for batch in earlier if batch >= 0 for row in source.batch(batch, step.context.seed)]
    if event.reads:
        drawn: list[int] = step.buffers.get(event.reads[0]).data.tolist()
        return drawn
    source, batch = next_rows(step, reader, event.data)
    step.batches |= dict.fromkeys(event.frames, batch)
    return source.batch(batch, step.context.seed)


def lengths(step: StepState, event: Lengths) -> None:
    """One all-reduce of [rows, 2]: prompt and response lengths. Of the ranks that work on the same rows the first
    contributes; of ranks that know all lengths, the first."""
    context, world = step.context, step.context.world
    frame, spread = context.frames[event.frame], context.spreads[event.spread]
    table = torch.zeros(frame.count, 2, dtype=torch.int64, device=context.device)
    mesh = world.meshes[spread.mesh]
    if spread.granularity == "all":
        if world.rank == mesh.members()[0]:
            lens = step.rows.lens[frame.id]
            table[:, 0], table[:, 1] = lens.prompt, lens.response
    elif world.rank in mesh.members():
        at = coordinate(world.layouts[spread.layout], mesh, world.rank)
        if at.tp == at.pp == at.cp == 0:
            lens = step.rows.lens[frame.id]
            rows = step.my_rows(spread, frame.id)
            table[rows, 0], table[rows, 1] = lens.prompt[rows], lens.response[rows]
    group = world.group(event.mesh)
    if group is not None:
        all_reduce(table, group=group)
    if event.ahead > 0 or frame.id not in context.known_ahead:
        lens = RowLengths(table[:, 0], table[:, 1])
        lens.to_list("tokens")  # here, since this event waits anyway, and not where a later one would be waited for
        step.set_lengths(frame.id, lens)


def transfer_values(step: StepState, ring: EventRing, event: Transfer) -> None:
    """Start sending and receiving; whoever reads a value first waits for it."""
    context = step.context
    src, dst = context.spreads[event.src], context.spreads[event.dst]
    for k, name in enumerate(event.values):
        holds = context.rank in context.world.meshes[src.mesh].members()
        held = step.buffers.get(f"{name}@{src.id}") if holds else None
        issued = transfer(step.rows, context.values[name], src, dst, held, message_tag(event, k))
        step.ragged_bytes += issued.bytes if event.bytes < 0 else 0
        step.buffers.put(f"{name}@{dst.id}", Pending(ring.wait_tracker(issued.finish), issued.bytes))


def compute(step: StepState, reader: DataReader, rewards: RewardPool, ring: EventRing, event: Compute) -> None:
    context = step.context
    spread, program = context.spreads[event.spread], context.programs[event.program]
    frame_rows = {frame: _frame_rows(step, event, frame) for frame in event.frames}
    inputs = {}
    for name, value in event.inputs:
        record = context.values[value]
        ids = _ids(context, record.extent, record.frame, frame_rows)
        inputs[name] = step.read(event.reads, value).select(ids).data
        if record.level == "turn":
            inputs[name] = inputs[name][_turn_sizes(frame_rows, record.frame).reshape(-1) > 0]

    def call_python(node: Node) -> torch.Tensor:
        frame = str(node.attr("frame"))
        rows, names = python_rows(step, reader, event.reads, frame, frame_rows[frame].rows, frames_of_call(node.attrs))
        function = context.functions[str(node.attr("function"))]
        ring.begin_call(function.name)
        numbers = rewards.call(function, rows, names)
        ring.resume()
        return torch.tensor(cast("list[float]", numbers), dtype=torch.float32, device=context.device)

    def row_numbers(node: Node, rows: torch.Tensor) -> torch.Tensor:
        return _rows_with_tokens(step, event, str(node.attr("frame")), rows)

    results = run_compute(program, inputs, frame_rows, {f: context.frames[f] for f in event.frames},
                          context.world.group(spread.mesh), call_python, step.compute_seed(event.id), step.index,
                          step.iteration if step.evaluated_source else 0, context.entries, row_numbers)
    for name, value in event.outputs:
        record, data = context.values[value], results[name]
        ids = _ids(context, record.extent, record.frame, frame_rows)
        data = data.reshape(-1)
        if record.level == "turn":
            there = _turn_sizes(frame_rows, record.frame).reshape(-1) > 0
            data = torch.zeros_like(there, dtype=data.dtype).masked_scatter(there, data)
        exact = record.dtype == "bool" or record.level == "batch"  # one number per step may take eight bytes
        step.write(value, spread.id, ids, data if exact else data.float())


def _rows_with_tokens(step: StepState, event: Compute, frame: str, rows: torch.Tensor) -> torch.Tensor:
    """[R, HEAD + longest row] float64: rows of a table, as `plan/arrays.py` says. The completion of a conversation
    begins with the first turn."""
    record, lens = step.context.frames[frame], step.rows.lens[frame]
    held = step.read(event.reads, f"{frame}.tokens")
    table = torch.zeros(len(rows), HEAD + longest_row(record), dtype=torch.float64, device=step.context.device)
    for i, row in enumerate(rows.tolist()):
        ids, prompt = held.select(rows[i : i + 1]).data, int(lens.prompt[row])
        if record.max_turns:
            ids, own = unmarked(ids)
            prompt = own.tolist().index(True) if own.any() else len(ids)
        table[i, :HEAD] = table.new_tensor([row, prompt, len(ids)])
        table[i, HEAD : HEAD + len(ids)] = ids_of(ids).to(torch.float64)  # float64 cannot hold all numbers of images
    return table


def collect(step: StepState, event: Collect) -> None:
    """Append the rows of this iteration to those of the iterations before."""
    context, buffers = step.context, step.buffers
    frame, into = context.frames[event.frame], context.frames[event.into]
    for value, collected in event.values:
        record, name = context.values[value], f"{collected}@{event.dst}"
        if record.extent == "lengths":
            lens, new = step.rows.lens[into.id], step.rows.lens[frame.id]
            rows = slice(step.iteration * frame.count, (step.iteration + 1) * frame.count)
            lens.prompt[rows], lens.response[rows] = new.prompt, new.response
            step.rows.set_lengths(into.id, RowLengths(lens.prompt, lens.response))
        elif record.extent == "columns":
            buffers.put(name, [*buffers.get(name), *buffers.get(f"{value}@{event.src}")])
        else:
            size = frame.count // frame.per_prompt if record.extent == "prompt" else frame.count
            held = buffers.get(f"{value}@{event.src}")
            buffers.put(name, buffers.get(name).append(held, step.iteration * size))


def make_empty(step: StepState, buffer: str) -> None:
    """A buffer to which a loop will append."""
    value, _ = split_buffer(buffer)
    context, record = step.context, step.context.values[value]
    count = context.frames[record.frame].count
    if record.extent == "lengths":
        step.rows.set_lengths(record.frame, RowLengths(*(
            torch.zeros(count, dtype=torch.int64, device=context.device) for _ in range(2))))
    empty: list[Any] | RaggedRows = [] if record.extent == "columns" else \
        RaggedRows.empty(DTYPES[record.dtype], context.device)
    step.buffers.put(buffer, empty)


def _frame_rows(step: StepState, event: Compute, frame: str) -> FrameRows:
    rows = step.my_rows(step.context.spreads[event.spread], frame)
    lens, name = step.rows.lens[frame], f"{frame}.turn_sizes"
    sizes = None
    if any(split_buffer(b)[0] == name for b in event.reads):
        sizes = step.read(event.reads, name).select(rows).data.view(-1, step.context.frames[frame].max_turns)
    return FrameRows(rows, rows // step.context.frames[frame].per_prompt, lens.response[rows],
                     prompt_lens=lens.prompt[rows], turn_sizes=sizes)


def _turn_sizes(frame_rows: dict[str, FrameRows], frame: str) -> torch.Tensor:
    """[S, most turns]"""
    return present(frame_rows[frame].turn_sizes, f"turns of {frame}", "run")


def _ids(context: RunContext, extent: str, frame: str, frame_rows: dict[str, FrameRows]) -> torch.Tensor:
    """The row or prompt numbers of a value of this extent and frame ([0] at batch level)."""
    if extent in ("batch", "array"):
        return torch.zeros(1, dtype=torch.int64, device=context.device)
    rows = frame_rows[frame if frame in frame_rows else _same_index_set(context, extent, frame, frame_rows)]
    return rows.prompts.unique() if extent == "prompt" else rows.rows


def _same_index_set(context: RunContext, extent: str, frame: str, frame_rows: dict[str, FrameRows]) -> str:
    """A frame of `frame_rows` that has the same prompts, or the same rows, as `frame`, which is not among them."""
    wanted, frames = context.frames[frame], context.frames
    return next(f for f in frame_rows if (frames[f].prompt_space == wanted.prompt_space if extent == "prompt"
                                          else frames[f].row_space == wanted.row_space))


def free(models: ModelStore, step: StepState, event: Free) -> None:
    for buffer in event.buffers:
        left, right = split_buffer(buffer)
        if left not in models.context.models:
            step.buffers.free(buffer)
        elif (left, right) in models.shards:  # only the layout's own ranks hold it
            models.free(left, right)
