"""Which rows of each frame this and every other rank works on in the current step.

In: spreads, frames and row lengths. Out: row numbers, from the pure functions of `sharding/partition.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rldsl.plan.model import Frame, Plan, Spread, Value
from rldsl.runtime.comm.world import World
from rldsl.sharding.layout import dp_index
from rldsl.sharding.partition import Rows, prompt_space, shard_rows, train_schedule


@dataclass
class RowLengths:
    """Lengths of all rows of a frame: [count] int64 each."""

    prompt: torch.Tensor
    response: torch.Tensor

    def of(self, extent: str) -> torch.Tensor:
        """Entries of each row for a value of this extent."""
        if extent == "tokens":
            return self.prompt + self.response
        return self.response if extent == "response" else torch.ones_like(self.prompt)


@dataclass
class StepRows:
    """The divisions of one step, each found once. lens: frame -> lengths, as far as they are known here."""

    plan: Plan
    world: World
    step: int
    lens: dict[str, RowLengths] = field(default_factory=dict)
    _shards: dict[str, tuple[dict[str, Rows], ...]] = field(default_factory=dict)

    def know(self, frame: str, lens: RowLengths) -> None:
        """Lengths that every rank knows. Divisions found before used older lengths (of a frame made in a repeat)."""
        self.lens[frame] = lens
        self._shards.clear()

    @cached_property
    def frames(self) -> Mapping[str, Frame]:
        return {f.id: f for f in self.plan.frames}

    def shards(self, spread: Spread) -> tuple[dict[str, Rows], ...]:
        """[shard][frame] -> rows, for the frames of the spread and those that share their rows or prompts."""
        if spread.id not in self._shards:
            known = self.frames
            of = prompt_space(known[spread.frames[0]], known) if spread.frames else None
            frames = [f for f in known.values() if of is None or prompt_space(f, known) == of]
            frames = [f for f in frames if not f.partial or f.partial in self.lens]  # others are not made yet
            self._shards[spread.id] = shard_rows(spread, self.world.dp(spread), frames, self._totals(spread, frames),
                                                 self.plan.header.seed, self.step, tuple(known.values()))
        return self._shards[spread.id]

    def schedule(self, spread: Spread) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
        """[epoch][minibatch][shard] -> rows of a training spread."""
        frames = tuple(self.frames.values())
        totals = self._totals(spread, [self.frames[f] for f in spread.frames])
        return train_schedule(spread, self.world.dp(spread), frames, totals, self.plan.header.seed, self.step)

    def shard(self, spread: Spread, rank: int) -> int:
        """Which shard of the spread a rank of its mesh works on."""
        if not spread.layout:
            return 0
        layout = self.world.layouts[spread.layout]
        return dp_index(layout, self.world.meshes[layout.mesh].members().index(rank))

    def ids(self, spread: Spread, value: Value) -> dict[int, Rows]:
        """The ids that each rank of the spread's mesh holds of a value: rows, prompts, or 0 at batch level. Found once
        for each shard, since there may be thousands of ranks."""
        ranks = self.world.meshes[spread.mesh].members()
        if value.level == "batch":
            return dict.fromkeys(ranks, (0,))
        frame = self.frames[value.frame]
        shards = [tuple(rows[frame.id]) for rows in self.shards(spread)]
        if value.extent == "prompt":
            shards = [tuple(sorted({r // frame.per_prompt for r in rows})) for rows in shards]
        if spread.unit == "all" or not spread.layout:
            return dict.fromkeys(ranks, shards[0])
        layout = self.world.layouts[spread.layout]
        return {rank: shards[dp_index(layout, i)] for i, rank in enumerate(ranks)}

    def sizes(self, value: Value, ids: torch.Tensor) -> torch.Tensor:
        """Entries of each id."""
        if value.extent in ("tokens", "response"):
            return self.lens[value.frame].of(value.extent)[ids]
        return torch.ones_like(ids)

    def _totals(self, spread: Spread, frames: Sequence[Frame]) -> dict[str, list[int]]:
        """Lengths of the frames that weigh, and of those that tell which rows of `frames` there are."""
        wanted = {f.partial for f in frames if f.partial} | ({*spread.frames} if spread.weigh == "tokens" else set())
        return {f: self.lens[f].of("tokens").tolist() for f in sorted(wanted)}
