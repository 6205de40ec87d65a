"""Events on values: fetch, lengths, transfer, compute, free."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rldsl.plan.events import Collect, Compute, Fetch, Free, Lengths, Select, Transfer, split
from rldsl.plan.expr import Node
from rldsl.runtime.comm.exchange import DTYPES, transfer
from rldsl.runtime.comm.row_assignment import Lens
from rldsl.runtime.interpreter.eval_loops import next_rows
from rldsl.runtime.interpreter.expression_programs import View, run_compute
from rldsl.runtime.interpreter.state import State
from rldsl.runtime.store import Column
from rldsl.sharding.layout import coordinate
from rldsl.sharding.partition import prompt_space


def fetch(state: State, event: Fetch) -> None:
    """The next rows, the same on every participant: read and tokenized, never sent."""
    source, turn = next_rows(state, event)
    spreads = dict(split(b) for b in event.writes)
    for name, got in source.step(turn, state.seed).items():
        frame = next(f for f in event.frames if not name or f.endswith(f".{name}"))
        absent = [0] * (state.frames[frame].count - len(got.tokens))  # the last rows of a short batch
        lens = Lens(_whole(state, [*got.prompt_lens, *absent]), _whole(state, [*got.response_lens, *absent]))
        state.know_lengths(frame, lens)
        if f"{frame}.tokens" in spreads:
            ids = torch.arange(len(got.tokens), device=state.device)
            state.write(f"{frame}.tokens", spreads[f"{frame}.tokens"], ids, torch.cat(got.tokens).to(state.device))
        for number in state.data[event.data].numbers:
            if f"{frame}.{number}" in spreads:
                data = torch.tensor([float(row[number]) for row in source.columns(turn, state.seed)],
                                    device=state.device)
                ids = torch.arange(len(data), device=state.device)
                state.write(f"{frame}.{number}", spreads[f"{frame}.{number}"], ids, data)
        if f"{frame}.columns" in spreads:
            places = [source.table.place(n) for n in source.batch(turn, state.seed)]
            state.store.put(f"{frame}.columns@{spreads[f'{frame}.columns']}",
                            list(zip(places, source.columns(turn, state.seed))))


def _whole(state: State, lengths: list[int]) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int64, device=state.device)


def lengths(state: State, event: Lengths) -> None:
    """One all-reduce of [rows, 2]; of each shard only the first rank contributes."""
    frame, spread, world = state.frames[event.frame], state.spreads[event.spread], state.world
    table = torch.zeros(frame.count, 2, dtype=torch.int64, device=state.device)
    layout = world.layouts[spread.layout]
    mesh = world.meshes[layout.mesh]
    if world.rank in mesh.members():
        at = coordinate(layout, mesh, world.rank)
        if at.tp == at.pp == at.cp == 0:
            lens = state.rows.lens[frame.id]
            rows = state.my_rows(spread, frame.id)
            table[rows, 0], table[rows, 1] = lens.prompt[rows], lens.response[rows]
    group = world.group(event.mesh)
    if group is not None:
        dist.all_reduce(table, group=group)
    state.know_lengths(frame.id, Lens(table[:, 0], table[:, 1]))


def move(state: State, event: Transfer) -> None:
    """Issued here, waited for where it is first read."""
    src, dst, rank = state.spreads[event.src], state.spreads[event.dst], state.world.rank
    for k, name in enumerate(event.values):
        holds = rank in state.world.meshes[src.mesh].members()
        held = state.store.take(f"{name}@{src.id}") if holds else None
        pending = state.told(transfer(state.rows, state.values[name], src, dst, held, event.id * 16 + k))
        state.ragged += pending.bytes if event.bytes < 0 else 0
        state.store.put(f"{name}@{dst.id}", pending)


def compute(state: State, event: Compute) -> None:
    spread, program = state.spreads[event.spread], state.programs[event.program]
    views = {frame: _view(state, event, frame) for frame in event.frames}
    inputs = {}
    for name, value in event.inputs:
        record = state.values[value]
        ids = _ids(state, record.extent, record.frame, views)
        inputs[name] = state.read(event.reads, value).pick(ids).data

    def call_py(node: Node) -> torch.Tensor:
        numbers = views[str(node.attr("frame"))].rows
        rows, names = reward_rows(state, event, str(node.attr("frame")), numbers)
        assert state.rewards is not None
        function = state.functions[str(node.attr("function"))]
        state.ring.calls(function.name)
        found = state.rewards.call(function, rows, names)
        state.ring.goes_on()
        return torch.tensor(found, dtype=torch.float32, device=state.device)

    found = run_compute(program, inputs, views, {f: state.frames[f] for f in event.frames},
                        state.world.group(spread.mesh), call_py, state.drawing_seed(event), state.step - 1)
    for name, value in event.outputs:
        record, data = state.values[value], found[name]
        ids = _ids(state, record.extent, record.frame, views)
        data = data.reshape(-1)
        kept = record.dtype == "bool" or record.level == "batch"  # one number a step is worth its eight bytes
        state.write(value, spread.id, ids, data if kept else data.float())


def select(state: State, event: Select) -> None:
    """The kept rows of what this rank holds under the event's spread."""
    frame, spread = state.frames[event.frame], state.spreads[event.spread]
    if event.condition:
        rows = state.my_rows(spread, frame.of)
        kept = rows[state.read(event.reads, event.condition).pick(rows).data.to(torch.bool)]
        whole = state.rows.lens[frame.of]
        lens = Lens(torch.zeros_like(whole.prompt), torch.zeros_like(whole.response))
        lens.prompt[kept], lens.response[kept] = whole.prompt[kept], whole.response[kept]
        state.rows.know(frame.id, lens)  # of the own rows only, until the lengths are exchanged
    rows = state.my_rows(spread, frame.id)
    for value, kept_value in event.values:
        ids = _ids(state, state.values[value].extent, frame.id, {frame.id: View(rows, rows // frame.per_prompt, rows)})
        state.store.put(f"{kept_value}@{spread.id}", state.read(event.reads, value).pick(ids))


def collect(state: State, event: Collect) -> None:
    """Rows of this turn behind those of the turns before."""
    frame, into = state.frames[event.frame], state.frames[event.into]
    for value, collected in event.values:
        record, name = state.values[value], f"{collected}@{event.dst}"
        if record.extent == "lengths":
            lens, now = state.rows.lens[into.id], state.rows.lens[frame.id]
            here = slice(state.turn * frame.count, (state.turn + 1) * frame.count)
            lens.prompt[here], lens.response[here] = now.prompt, now.response
            state.rows.know(into.id, lens)
        elif record.extent == "columns":
            state.store.put(name, [*state.store.take(name), *state.store.take(f"{value}@{event.src}")])
        else:
            size = frame.count // frame.per_prompt if record.extent == "prompt" else frame.count
            held = state.store.take(f"{value}@{event.src}")
            state.store.put(name, state.store.take(name).behind(held, state.turn * size))


def empty(state: State, buffer: str) -> None:
    """A buffer to which a loop will append."""
    value, _ = split(buffer)
    record = state.values[value]
    count = state.frames[record.frame].count
    if record.extent == "lengths":
        state.rows.know(record.frame, Lens(*(torch.zeros(count, dtype=torch.int64, device=state.device)
                                             for _ in range(2))))
    state.store.put(buffer, [] if record.extent == "columns" else Column.none(DTYPES[record.dtype], state.device))


def _view(state: State, event: Compute, frame: str) -> View:
    rows = state.my_rows(state.spreads[event.spread], frame)
    return View(rows, rows // state.frames[frame].per_prompt, state.rows.lens[frame].response[rows])


def _ids(state: State, extent: str, frame: str, views: dict[str, View]) -> torch.Tensor:
    if extent == "batch":
        return torch.zeros(1, dtype=torch.int64, device=state.device)
    view = views[frame] if frame in views else views[_kin(state, extent, frame, views)]
    return view.prompts.unique() if extent == "prompt" else view.rows


def _kin(state: State, extent: str, frame: str, views: dict[str, View]) -> str:
    """A frame at hand that has the same prompts, or the same rows, as one that is not."""
    of = state.frames[frame]
    return next(f for f in views if (state.frames[f].prompts == of.prompts if extent == "prompt"
                                     else state.frames[f].rows == of.rows))


def reward_rows(state: State, event: Compute, frame: str, rows: torch.Tensor) -> tuple[list[dict[str, Any]], list[str]]:
    """What a user's function sees of each row: the data columns, and the sequence as text and as token ids; and what
    messages call the row: its number in the step, and its line of the data.

    finished: the response is shorter than the most tokens allowed, or its last token ends a sequence. A response that
    a stop string ended on exactly the last allowed token counts as unfinished: its tokens alone do not tell."""
    record = state.frames[frame]
    of = prompt_space(record, state.frames)
    columns = next((state.store.take(b) for b in event.reads if split(b)[0].endswith(".columns")
                    and state.frames[state.values[split(b)[0]].frame].prompts == of), None)
    packed = state.packed(frame, state.read(event.reads, f"{frame}.tokens"), rows)
    tokenizer = state.source(record.data).tokenizer
    ends, found, names, at = state.source(record.data).ends, [], [], 0
    tokens = packed.tokens.tolist()
    for row, p, r in zip(rows.tolist(), packed.prompt_lens.tolist(), packed.response_lens.tolist()):
        prompt, completion = tokens[at : at + p], tokens[at + p : at + p + r]
        at += p + r
        place, held = columns[row // record.per_prompt] if columns is not None else ("", {})
        names.append(f"{row} ({place})" if place else str(row))
        found.append({
            **held,
            "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
            "completion": tokenizer.decode(completion, skip_special_tokens=True),
            "prompt_ids": prompt, "completion_ids": completion,
            "finished": r < record.max_response_tokens or (r > 0 and completion[-1] in ends),
        })
    return found, names


def free(state: State, event: Free) -> None:
    for buffer in event.buffers:
        left, right = split(buffer)
        if left not in state.models:
            state.store.free(buffer)
        elif (left, right) in state.shards:  # of the layout's own ranks
            state.drop(left, right)
