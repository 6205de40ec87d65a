"""Responses that have not ended in a step, and that the next one continues (`generate(..., per_step=N)`).

In: the rows of a generated frame. Out: the same rows as the next step numbers them; and what a checkpoint stores of
them, by value and row, so that a run resumes under any placement. A tensor is named
`carried|FRAME|VALUE|PART.RANK|0:n`, with the parts of a ragged value: ids, sizes and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from rldsl.diag import fail
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.store import RaggedRows
from rldsl.sharding.layout import coordinate
from rldsl.sharding.partition import rows_by_dp

PREFIX = "carried"  # of the names of tensors in a checkpoint
SETTINGS = "settings"  # rows of a step, `per_step`, `max_new_tokens`: what must not change when a run resumes
FIELDS = {"tokens": torch.int64, "logprobs": torch.float32, "finished": torch.bool}


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """The responses of those prompts of which not all have ended, on the ranks that began them."""

    step: int  # that generated them last, from 1
    tokens: RaggedRows  # int64, of the responses so far; rows are numbered as in that step
    logprobs: RaggedRows  # float32, of these tokens
    finished: RaggedRows  # bool, one entry for each row: ended by an end-of-sequence token or a stop string

    def numbered(self, rows_of_step: int) -> CarriedRows:
        """As the next step numbers them. rows_of_step: responses that begin in a step."""
        tokens, logprobs, finished = (replace(x, ids=x.ids + rows_of_step)
                                      for x in (self.tokens, self.logprobs, self.finished))
        return CarriedRows(self.step + 1, tokens, logprobs, finished)

    def among(self, rows: torch.Tensor) -> CarriedRows:
        """Those of `rows` ([S] int64, ascending) that are there."""
        ids = self.finished.ids[torch.isin(self.finished.ids, rows)]
        return CarriedRows(self.step, *(x.gather(ids) for x in (self.tokens, self.logprobs, self.finished)))


class Stored(Protocol):
    """A checkpoint, as far as this module needs it."""

    @property
    def path(self) -> Path: ...

    @property
    def step(self) -> int: ...

    @property
    def frames_carried(self) -> set[str]: ...

    def rows_of(self, key: str) -> RaggedRows: ...

    def damaged(self, why: str) -> Exception: ...


def settings(context: RunContext, id: str) -> torch.Tensor:
    """[3] int64: see `SETTINGS`. id: of a generated frame."""
    frame, event = context.frames[id], context.continued[id]
    return torch.tensor([frame.count // frame.iterations, event.per_step, event.sampling.max_new_tokens], device="cpu")


def tensors(context: RunContext, carried: Mapping[str, CarriedRows]) -> dict[str, torch.Tensor]:
    """What this rank writes to a checkpoint: of the ranks that hold the same rows, the first writes them."""
    found: dict[str, torch.Tensor] = {}
    for frame, event in context.continued.items():
        layout = context.world.layouts[event.layout]
        mesh = context.world.meshes[layout.mesh]
        if frame not in carried or context.rank not in mesh.members():
            continue
        at = coordinate(layout, mesh, context.rank)
        if at.tp == at.pp == at.cp == 0:
            rows, chosen = carried[frame], settings(context, frame)
            one = torch.zeros(1, dtype=torch.int64, device="cpu")
            values = {name: getattr(rows, name) for name in FIELDS}
            if at.dp == 0:
                values[SETTINGS] = RaggedRows(one, torch.full_like(one, chosen.numel()), chosen)
            for name, value in values.items():
                for part, data in (("ids", value.ids), ("sizes", value.sizes), ("data", value.data)):
                    key = f"{PREFIX}|{frame}|{name}|{part}.{context.rank}|0:{data.numel()}"
                    found[key] = data.to("cpu", copy=True)
    return found


def restored(context: RunContext, checkpoint: Stored) -> dict[str, CarriedRows]:
    """What the next step of a resumed run continues, on this rank. RL0761, RL0762."""
    if checkpoint.frames_carried != context.continued.keys():
        raise _differs(checkpoint, "responses that continue in the next step: " + (
            ", ".join(sorted(checkpoint.frames_carried)) or "none"))
    found: dict[str, CarriedRows] = {}
    for frame, event in context.continued.items():
        then, now = checkpoint.rows_of(f"{PREFIX}|{frame}|{SETTINGS}").data.tolist(), settings(context, frame).tolist()
        if then != now:
            raise _differs(checkpoint, "; ".join(
                f"{what}: {a} -> {b}" for what, a, b in zip(
                    ("responses that begin in a step", "`per_step`", "`max_new_tokens`"), then, now, strict=True)
                if a != b))
        layout = context.world.layouts[event.layout]
        if context.rank not in context.world.meshes[layout.mesh].members():
            continue
        values = {name: checkpoint.rows_of(f"{PREFIX}|{frame}|{name}") for name in FIELDS}
        moved = {name: RaggedRows(*(x.to(context.device) for x in (v.ids, v.sizes, v.data.to(FIELDS[name]))))
                 for name, v in values.items()}
        rows = CarriedRows(min(checkpoint.step + event.ahead, context.plan.header.steps), **moved)
        if not _is_sound(rows, context.frames[frame].count, event.sampling.max_new_tokens):
            raise checkpoint.damaged(f"the responses of {frame} contradict each other")
        found[frame] = rows.among(_own_slots(context, frame))
    return found


def _own_slots(context: RunContext, id: str) -> torch.Tensor:
    """[S] int64, ascending: the rows of a generated frame that this rank works on, whether they exist or not."""
    event = context.continued[id]
    spread, frame = context.spreads[event.spread], replace(context.frames[event.frame], present_in="")
    layout = context.world.layouts[event.layout]
    own = coordinate(layout, context.world.meshes[layout.mesh], context.rank).dp
    rows = rows_by_dp(spread, layout.dp, [frame], {}, seed=0, step=0)[own][frame.id]
    return torch.tensor(rows, dtype=torch.int64, device=context.device)


def _is_sound(rows: CarriedRows, count: int, longest: int) -> bool:
    """Whether the parts of some rows fit together. count: rows of the frame. longest: tokens of a response."""
    ids, sizes = rows.finished.ids, rows.tokens.sizes
    same = all(torch.equal(x.ids, ids) for x in (rows.tokens, rows.logprobs))
    within = not ids.numel() or int(ids.min()) >= 0 and int(ids.max()) < count and int(sizes.max()) <= longest
    return same and within and torch.equal(rows.logprobs.sizes, sizes) and bool((rows.finished.sizes == 1).all())


def _differs(checkpoint: Stored, note: str) -> Exception:
    return fail("RL0762", "the checkpoint was written with another `per_step`", place=str(checkpoint.path),
                notes=(note,), help="resume with the program that wrote it, or start a new run from its models")
