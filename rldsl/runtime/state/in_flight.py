"""What events that run ahead have made of later steps, in checkpoints.

In: the states of these steps. Out: tensors by name, and from them the buffers of an event, on the ranks of any
placement. What depends on parameters, states or buffers of the past is stored: what was generated, inferred with a
model that changes, drawn, sampled, and computed from a state. The rest of what runs ahead is computed again when a run
resumes: it may run ahead by another number of steps under another placement. A tensor is named
`later step|STEP|VALUE|PART.RANK|0:n`, with the parts of a ragged value: ids, sizes and data. In a loop, the rows of an
iteration come after those of the iterations before, and the condition that ended the loop is stored with an entry for
each iteration, so that a resumed run makes as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from rldsl.diag import fail
from rldsl.plan.events import Event, Item, Loop, When, ahead_of, split_buffer
from rldsl.plan.projection import event_paths, of_steps
from rldsl.plan.references import Role, references
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import RaggedRows
from rldsl.sharding.layout import coordinate


class Rows(Protocol):
    """A checkpoint, from which rows are read."""

    def rows_of(self, key: str) -> RaggedRows: ...


class Ahead(Rows, Protocol):
    """A checkpoint, as far as `check` needs it."""

    @property
    def path(self) -> Path: ...

    @property
    def steps_ahead(self) -> set[int]: ...

    def has_rows_of(self, key: str) -> bool: ...

    def earlier(self) -> Iterable[tuple[Path, int, set[int]]]: ...


PREFIX = "later step"  # of the names of tensors in a checkpoint; no model, state or buffer has a name with a blank


def stored_values(event: Event, context: RunContext) -> tuple[str, ...]:
    """The values of an event that a checkpoint stores, and the lengths of the rows that it makes. KV caches are not
    needed again."""
    if not event.traits.stored_ahead:
        return ()
    if not event.new_rows and event.copies() and context.changing_models.isdisjoint(m for m, _ in event.copies()):
        return ()
    if event.traits.family == "compute" and not context.reads_states(event):
        return ()
    values = (v for v, _ in map(split_buffer, event.writes) if not v.endswith(".cache"))
    return (*values, *(f"{frame}.lengths" for frame in event.new_rows))


def key_of(step: int, value: str) -> str:
    """What the tensors of a value are called, without the part."""
    return f"{PREFIX}|{step}|{value}"


def keep(step: StepState, event: Event) -> None:
    """Note what an event that runs ahead has made; buffers may be freed before the next checkpoint."""
    context = step.context
    stored = stored_values(event, context)
    for value, buffer in _buffers(event, stored):
        # `keep_iterations` stores the conditions of loops
        if value not in context.conditions and _owns(context, buffer, context.values[value].level == "batch"):
            _append(step, value, step.buffers.get(buffer), context.values[value].frame)
    for frame in event.new_rows if stored and _owns(context, event.writes[0]) else ():
        lens, buffer = step.rows.lens[frame], next(b for b in event.writes if split_buffer(b)[0] == f"{frame}.tokens")
        rows = step.buffers.get(buffer).ids
        _append(step, f"{frame}.lengths", RaggedRows(
            rows, torch.full_like(rows, 2), torch.stack([lens.prompt[rows], lens.response[rows]], 1).flatten()), frame)


def _buffers(event: Event, stored: Sequence[str]) -> list[tuple[str, str]]:
    """The stored values of an event that are in buffers, each with its buffer. A sample names the lengths of its rows
    among them, which every rank has in its table of lengths instead."""
    written = ((split_buffer(b)[0], b) for b in event.writes)
    return [(v, b) for v, b in written if v in stored and v not in {f"{frame}.lengths" for frame in event.new_rows}]


def _append(step: StepState, value: str, rows: RaggedRows, frame: str) -> None:
    before = step.made.get(value) or RaggedRows.empty(rows.data.dtype, rows.data.device)
    step.made[value] = before.append(rows, step.iteration * _count(step.context, frame))


def _count(context: RunContext, frame: str) -> int:
    """The rows of a frame in an iteration; 1: of a number of the whole batch, which has no frame."""
    return context.frames[frame].count if frame else 1


def keep_iterations(step: StepState, loop: Loop, count: int) -> None:
    """Note how many iterations a loop that runs ahead made."""
    value, spread = split_buffer(loop.until)
    context = step.context
    if context.rank == context.world.meshes[context.spreads[spread].mesh].members()[0]:
        ids = torch.arange(count, device=context.device)
        step.made[value] = RaggedRows(ids, torch.ones_like(ids), ids == count - 1)


def iterations(checkpoint: Rows, step: int, loop: Loop) -> int:
    """How many iterations of a loop there are in a checkpoint, for a later step."""
    return len(checkpoint.rows_of(key_of(step, split_buffer(loop.until)[0])).ids)


def batches_read(items: Iterable[Item], step: int, checkpoint: Rows, iteration: int = 0) -> Counter[str]:
    """Data source -> the batches of it that were read in order ahead of a later step. iteration: of the loop around the
    items, from 1; 0: there is none but that of the steps."""
    found = Counter[str]()
    for item in items:
        if isinstance(item, Event):  # one that reads a source in order makes rows of nothing else
            if item.ahead > 0 and item.new_rows and item.traits.family == "data" and not item.reads:
                found.update(r.id for r in references(item) if r.role is Role.DATA)
        elif isinstance(item, When):
            found += batches_read(item.body, step, checkpoint, iteration) if item.runs(iteration or step) else Counter()
        elif isinstance(item, Loop) and ahead_of(item) > 0:
            for i in range(1, iterations(checkpoint, step, item) + 1):
                found += batches_read(item.body, step, checkpoint, i)
    return found


def _owns(context: RunContext, buffer: str, one: bool = False) -> bool:
    """Whether this rank writes its rows of a buffer: the first of those that hold the same. one: it is a number of the
    whole batch, which all ranks have."""
    spread = context.spreads[split_buffer(buffer)[1]]
    mesh = context.world.meshes[spread.mesh]
    if one or spread.granularity == "all" or not spread.layout:
        return context.rank == mesh.members()[0]
    if context.rank not in mesh.members():
        return False
    at = coordinate(context.world.layouts[spread.layout], mesh, context.rank)
    return at.tp == at.pp == at.cp == 0


def tensors(later: Mapping[int, StepState], rank: int) -> dict[str, torch.Tensor]:
    """What this rank writes to a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for number, step in later.items():
        for value, rows in step.made.items():
            for part, data in (("ids", rows.ids), ("sizes", rows.sizes), ("data", rows.data)):
                found[f"{key_of(number, value)}|{part}.{rank}|0:{data.numel()}"] = data.to("cpu", copy=True)
    return found


def _values_of(step: int, context: RunContext, checkpoint: Ahead | None = None) -> set[str]:
    """What a checkpoint stores of a later step. checkpoint: which says how many iterations each loop made, so that
    blocks which none of them reached are left out; None: as if they all reached them."""
    found = set[str]()
    for event, path in event_paths(context.plan):
        if event.ahead > 0 and all(b.runs(step) for b in of_steps(path)):
            if checkpoint is None or _reached(step, path, checkpoint):
                found.update(stored_values(event, context))
            found.update(split_buffer(b.until)[0] for b in path[1:] if isinstance(b, Loop) and b.until)
    return found


def _reached(step: int, path: Sequence[Loop | When], checkpoint: Ahead) -> bool:
    """Whether an event inside these blocks ran in an iteration of the loop that is around it in the step, if any."""
    loop = next((b for b in path[1:] if isinstance(b, Loop)), None)
    if loop is None or not loop.until or not checkpoint.has_rows_of(key_of(step, split_buffer(loop.until)[0])):
        return True
    inside = [b for b in path[path.index(loop) + 1:] if isinstance(b, When)]
    return any(all(b.runs(i) for b in inside) for i in range(1, iterations(checkpoint, step, loop) + 1))


def check(checkpoint: Ahead, steps: Sequence[int], context: RunContext) -> None:
    """Whether a checkpoint holds what the plan made of these later steps, and of no others. RL0762."""
    holds = all(checkpoint.has_rows_of(key_of(s, v)) for s in steps for v in _values_of(s, context, checkpoint))
    if holds and checkpoint.steps_ahead == {s for s in steps if _values_of(s, context)}:
        return
    held = ", ".join(map(str, sorted(checkpoint.steps_ahead))) or "none"
    lag, last = context.plan.header.lag, context.plan.header.steps
    older = next((path for path, step, ahead in checkpoint.earlier()
                  if ahead == {s for s in range(step + 1, min(step + lag, last) + 1) if _values_of(s, context)}), None)
    other = (f"resume from {older}, which fits" if older
             else "resume with the `lag` and `steps` of the run that wrote it")
    raise fail("RL0762", "the checkpoint was written with another `lag`, or other `steps`", place=str(checkpoint.path),
               notes=(f"steps of which something was generated ahead: {held}",
                      f"with `lag={lag}` and `steps={last}`: {', '.join(map(str, steps)) or 'none'}"),
               help=f"{other}, or start a new run from its models")


def restore(step: StepState, event: Event, read: Callable[[str], RaggedRows]) -> None:
    """Do what an event did, from a checkpoint. read: all rows of a value, by `key_of`."""
    context = step.context
    for frame in event.new_rows:
        stored = read(key_of(step.number, f"{frame}.lengths"))
        _set_lengths(step, event, frame, _of_iteration(step, stored, frame))
    for value, buffer in _buffers(event, stored_values(event, context)):
        whole, spread = read(key_of(step.number, value)), context.spreads[split_buffer(buffer)[1]]
        ids, sizes, data = (x.to(context.device) for x in (whole.ids, whole.sizes, whole.data))
        record = context.values[value]
        now = _of_iteration(step, RaggedRows(ids, sizes, data), record.frame)
        if spread.granularity != "all":
            now = now.gather(on_device(step.rows.ids(spread, record)[context.rank], context.device))
        step.buffers.put(buffer, now)


def _of_iteration(step: StepState, stored: RaggedRows, frame: str) -> RaggedRows:
    """Of stored rows those of this iteration, as it numbers them."""
    count = _count(step.context, frame)
    now = stored.gather(stored.ids[stored.ids // count == step.iteration])
    return RaggedRows(now.ids - step.iteration * count, now.sizes, now.data)


def _set_lengths(step: StepState, event: Event, frame: str, stored: RaggedRows) -> None:
    """The lengths of the rows of a frame. Of rows that are divided, an exchange follows, which counts their tokens."""
    count, device = step.context.frames[frame].count, step.context.device
    lens = RowLengths(*(torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2)))
    ids = stored.ids.to(device)
    lens.prompt[ids], lens.response[ids] = stored.data.view(-1, 2).to(device).unbind(1)
    if event.traits.family == "data":
        step.set_lengths(frame, lens)
    else:
        step.rows.set_lengths(frame, lens)
