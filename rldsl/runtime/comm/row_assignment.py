"""Which rows of each frame this and every other rank works on in the current step.

In: spreads, frames and row lengths. Out: row numbers, from the pure functions of `sharding/partition.py`. A dp rank is
the set of ranks that work on the same rows under a layout: tp * cp * pp of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add

import torch

from rldsl.plan.entries import ENTRIES, HIDDEN
from rldsl.plan.model import Plan, Spread, Value
from rldsl.plan.spaces import IndexedFrame, indexed_frames
from rldsl.runtime.comm.world import World
from rldsl.runtime.host_numbers import on_device
from rldsl.sharding.balance import sequence_cost
from rldsl.sharding.layout import dp_index
from rldsl.sharding.partition import Rows, minibatch_rows_by_dp, rows_by_dp
from rldsl.sharding.siblings import Siblings


@dataclass
class RowLengths:
    """Lengths of all rows of a frame: [count] int64 each."""

    prompt: torch.Tensor    # tokens of each row's prompt
    response: torch.Tensor  # tokens of each row's response
    # the same numbers in the host's memory: (prompt, response). None: nobody has needed them yet
    on_host: tuple[list[int], list[int]] | None = field(default=None, init=False)

    @staticmethod
    def of_host(prompt: Sequence[int], response: Sequence[int], device: torch.device) -> RowLengths:
        """Lengths that the host knows."""
        made = RowLengths(on_device(prompt, device), on_device(response, device))
        made.on_host = list(prompt), list(response)
        return made

    def to_list(self, extent: str) -> list[int]:
        """What `of` returns, on the host, which waits for the device at most once. The tensors may not change
        afterwards."""
        prompt, response = self._read()
        if extent == "tokens":
            return list(map(add, prompt, response))
        return response if extent in ("response", ENTRIES, HIDDEN) else [1] * len(prompt)

    def prompts(self) -> list[int]:
        """Tokens of prompts, on the host, as `to_list`."""
        return self._read()[0]

    def of_rows(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """(prompt, response) of some rows, on the host, as `to_list`."""
        prompt, response = self._read()
        return [prompt[r] for r in rows], [response[r] for r in rows]

    def _read(self) -> tuple[list[int], list[int]]:
        if self.on_host is None:
            prompt, response = torch.stack([self.prompt, self.response]).tolist()
            self.on_host = prompt, response
        return self.on_host

    def of(self, extent: str) -> torch.Tensor:
        """[count]: entries of each row of a value with this extent, times its width."""
        if extent == "tokens":
            return self.prompt + self.response
        return self.response if extent in ("response", ENTRIES, HIDDEN) else torch.ones_like(self.prompt)


@dataclass
class StepRows:
    """Which rows each dp rank of a spread works on in one step; each division is computed once."""

    plan: Plan  # whose spreads these are
    world: World  # this rank and its communicators
    step_index: int  # from 0, as in seeds
    prompts: Mapping[str, int]  # spread -> rows of a prompt that is computed once (`plan/prompt_sources.py`)
    lens: dict[str, RowLengths] = field(default_factory=dict)  # frame -> lengths, as far as this rank knows them
    _rows_by_dp: dict[str, tuple[dict[str, Rows], ...]] = field(default_factory=dict)  # spread -> `rows_by_dp`

    def set_lengths(self, frame: str, lens: RowLengths) -> None:
        """The lengths of a frame's rows. Divisions computed before are dropped: they used older lengths, of the same
        frame in an earlier iteration of a loop."""
        self.lens[frame] = lens
        self._rows_by_dp.clear()

    @cached_property
    def frames(self) -> Mapping[str, IndexedFrame]:
        return indexed_frames(self.plan)

    def rows_by_dp(self, spread: Spread) -> tuple[dict[str, Rows], ...]:
        """[dp rank][frame] -> rows, for the frames of the spread, those that come from the same rows of data, and
        those that are concatenated in them."""
        if spread.id not in self._rows_by_dp:
            all_frames = self.frames
            divided = all_frames[spread.frames[0]] if spread.frames else None
            frames = [f for f in all_frames.values() if divided is None or f.root_origin == divided.root_origin
                      or f.among(divided) is not None]
            # rows of the others do not exist yet
            frames = [f for f in frames if not f.present_in or f.present_in in self.lens or f.id in spread.frames]
            self._rows_by_dp[spread.id] = rows_by_dp(
                spread, self.world.dp(spread), frames, self._totals(spread, frames), self.plan.header.seed,
                self.step_index, self._siblings(spread))
        return self._rows_by_dp[spread.id]

    def minibatch_parts(self, spread: Spread) -> tuple[tuple[tuple[Rows, ...], ...], ...]:
        """[epoch][minibatch][part] -> rows of a training spread. A part is a dp rank's, or if the spread has leaves, a
        leaf's: then a dp rank has consecutive ones, equally many on all ranks."""
        frames = tuple(self.frames.values())
        totals = self._totals(spread, [self.frames[f] for f in spread.frames])
        return minibatch_rows_by_dp(spread, spread.leaves or self.world.dp(spread), frames, totals,
                                    self.plan.header.seed, self.step_index, self._siblings(spread))

    def dp_index(self, spread: Spread, rank: int) -> int:
        """The index along dp, in the spread's layout, of a rank of its mesh; 0 if the spread has no layout."""
        if not spread.layout:
            return 0
        layout = self.world.layouts[spread.layout]
        return dp_index(layout, self.world.meshes[layout.mesh].members().index(rank))

    def ids(self, spread: Spread, value: Value) -> dict[int, Rows]:
        """The ids that each rank of the spread's mesh holds of a value: rows, prompts, or 0 at batch level. Computed
        once per dp rank: there may be thousands of ranks."""
        ranks = self.world.meshes[spread.mesh].members()
        if value.level == "batch":
            return dict.fromkeys(ranks, (0,))
        frame = self.frames[value.frame]
        ids_by_dp = [tuple(rows[frame.id]) for rows in self.rows_by_dp(spread)]
        if value.extent == "prompt":
            ids_by_dp = [tuple(sorted({r // frame.per_prompt for r in rows})) for rows in ids_by_dp]
        if spread.granularity == "all" or not spread.layout:
            return dict.fromkeys(ranks, ids_by_dp[0])
        layout = self.world.layouts[spread.layout]
        return {rank: ids_by_dp[dp_index(layout, i)] for i, rank in enumerate(ranks)}

    def sizes(self, value: Value, ids: torch.Tensor) -> torch.Tensor:
        """Entries of each of `ids`."""
        if value.ragged:
            return self.lens[value.frame].of(value.extent)[ids] * value.width
        return torch.full_like(ids, self._entries(value))

    def amounts(self, value: Value, ids: Sequence[int]) -> list[int]:
        """What `sizes` returns, on the host."""
        if value.ragged:
            numbers = self.lens[value.frame].to_list(value.extent)
            return [numbers[i] * value.width for i in ids]
        return [self._entries(value)] * len(ids)

    def _entries(self, value: Value) -> int:
        """Of each id of a value that has equally many everywhere."""
        if value.extent == "turn":
            return self.frames[value.frame].max_turns
        return value.width if value.extent == "array" else 1

    def _siblings(self, spread: Spread) -> Siblings | None:
        """The rows of a spread's frames that share a prompt, and what it costs to compute it."""
        if spread.id not in self.prompts:
            return None
        prompts = zip(*(self.lens[f].prompts() for f in spread.frames), strict=True)
        return Siblings(self.prompts[spread.id], [sum(map(sequence_cost, lengths)) for lengths in prompts])

    def _totals(self, spread: Spread, frames: Sequence[IndexedFrame]) -> dict[str, list[int]]:
        """Frame -> tokens of each row: of the frames that are balanced by tokens, and of those whose lengths say which
        rows of `frames` exist."""
        wanted = {f.present_in for f in frames if f.present_in in self.lens}
        wanted |= {*spread.frames} if spread.balance_by == "tokens" else set()
        return {f: self.lens[f].to_list("tokens") for f in sorted(wanted)}
