"""The state of a step: which one it is, the lengths of rows, the values that this rank holds, what was logged.

In: a run's context. Out: rows, columns and random seeds of the current step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch

from rldsl.plan.events import split_buffer
from rldsl.plan.model import Layout, Spread
from rldsl.plan.payloads import ROLLOUTS
from rldsl.plan.prompt_sources import shares_prompts
from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.comm.row_assignment import RowLengths, StepRows
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.state.carried import CarriedRows
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.logged_numbers import Arrivals, LoggedNumbers, SentLogs
from rldsl.runtime.state.turns import unmarked
from rldsl.runtime.store import BufferStore, RaggedRows
from rldsl.sharding.partition import Rows, key_of, mix
from rldsl.sharding.siblings import Siblings

COMPUTE_SEEDS = key_of("")  # keeps the seeds of computations apart from those of generated frames


@dataclass(frozen=True, slots=True)
class TalkTotals:
    """Sums over the conversations of a call on this rank's shard."""

    conversations: int = 0  # how many there were
    turns: int = 0  # of the model
    errors: int = 0  # those that an error or a time limit of their environment ended
    waited: float = 0.0  # seconds that they waited for their environments
    lasted: float = 0.0  # seconds from their beginnings to their ends
    given_away: int = 0  # how often one gave its slot away while it waited

    def __add__(self, other: TalkTotals) -> TalkTotals:
        return TalkTotals(self.conversations + other.conversations, self.turns + other.turns,
                          self.errors + other.errors, self.waited + other.waited, self.lasted + other.lasted,
                          self.given_away + other.given_away)


@dataclass
class StepState:
    """One rank's state of the step under way. Buffers live until the plan frees them, which may be longer than a
    step."""

    context: RunContext  # the plan and the communicators
    # the step under way, from 1; 0 before the first
    number: int = 0
    # the iteration of the innermost loop, from 0
    iteration: int = 0
    # data source that the innermost loop goes over once, in an evaluation; "" in any other loop
    evaluated_source: str = ""
    # values by buffer name (`value@spread`)
    buffers: BufferStore = field(default_factory=BufferStore)
    # metrics of this step, perhaps still on their way to this rank
    logged: list[LoggedNumbers] = field(default_factory=list)
    # waits for them
    arrivals: Arrivals = field(default_factory=Arrivals)
    # metrics that this rank has sent
    sent_logs: SentLogs = field(default_factory=SentLogs)
    # generate or compute event -> index of its last random draw in this step, from 0
    draws: dict[int, int] = field(default_factory=dict)
    # prompt and response tokens of the sequences with responses whose lengths this rank knows
    tokens: int = 0
    # bytes that this rank sent and received in transfers whose size depends on lengths
    ragged_bytes: int = 0
    # all ranks have agreed to end the run after this step
    stopped: bool = False
    # the condition of `stop when` held after this step, the last one
    ended: bool = False
    # steps of which events that run ahead have made something, by their numbers
    begun: dict[int, StepState] = field(default_factory=dict)
    # fetched frame -> the number of its batch, from 0
    batches: dict[str, int] = field(default_factory=dict)
    # generated frame -> the responses that the next step continues; the same object for all steps
    carried: dict[str, CarriedRows] = field(default_factory=dict)
    # generated frame -> [count] int64: tokens of its responses in the step that made it last; the same object for all
    # steps. Unknown in the first step of a resumed run
    lens_before: dict[str, torch.Tensor] = field(default_factory=dict)
    # generated frame whose responses continue in later steps -> tokens that this step sampled, where they are known
    sampled: dict[str, int] = field(default_factory=dict)
    # what conversations did that have ended, and no metric counts yet
    talked: list[TalkTotals] = field(default_factory=list)
    # of a later step: the values of events that run ahead, for checkpoints (`in_flight.py`)
    made: dict[str, RaggedRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = self._rows_of_step()

    def _rows_of_step(self) -> StepRows:
        return StepRows(self.context.plan, self.context.world, self.index, self.context.prompts_by_spread)

    @property
    def index(self) -> int:
        """The step under way, from 0: what random seeds are made of."""
        return self.number - 1

    def begin(self) -> None:
        """Begin the next step, with what events that run ahead have made of it."""
        self.number += 1
        self.talked.clear()  # only the rank that measures takes them
        begun = self.begun.pop(self.number, None)
        if begun is None:
            self.tokens = 0
            self.draws.clear()
            self.batches.clear()
            self.sampled.clear()
            self.rows = self._rows_of_step()
            return
        self.tokens, self.draws, self.rows, self.batches = begun.tokens, begun.draws, begun.rows, begun.batches
        self.sampled = begun.sampled
        self.ragged_bytes += begun.ragged_bytes
        self.buffers.update(begun.buffers)

    def later(self, number: int) -> StepState:
        """The state of a later step, for events that run ahead: what lasts from step to step is the same."""
        if number not in self.begun:
            step = StepState(self.context, number, buffers=BufferStore(self.buffers, self.context.plan.lasting),
                             carried=self.carried, lens_before=self.lens_before)
            self.begun[number] = step
        return self.begun[number]

    # random seeds

    def sampling_seed(self, event: int, frame: str) -> int:
        """A different seed for each generate of the program and each time that it runs in a step: two calls on the same
        prompts must not draw the same samples. It follows the name of the frame, not its place in the program, so that
        another statement leaves its samples as they were.

        event: its id. frame: the one that it makes."""
        return mix(self.context.seed, key_of(frame), self._next_draw(event)) >> 1  # 63 bits: devices have signed ints

    def compute_seed(self, event: int) -> int:
        """A seed for each time that a computation runs in a step; `uniform` adds the number of its call to it."""
        return mix(self.context.seed, COMPUTE_SEEDS, self._next_draw(event))

    def first_row(self, count: int) -> int:
        """The number of the first of a frame's `count` rows for random numbers: in an evaluation counted over all of
        its batches, so that what a row draws does not depend on their size."""
        return self.iteration * count if self.evaluated_source else 0

    def _next_draw(self, event: int) -> int:
        first = not (self.evaluated_source and self.iteration)  # the batches of one evaluation share a seed
        times = self.draws[event] = self.draws.get(event, -1) + first
        return times

    # rows and columns

    def my_row_numbers(self, spread: Spread, frame: str) -> Rows:
        """The rows of a frame that this rank works on under a spread, ascending."""
        return self.rows.rows_by_dp(spread)[self.rows.dp_index(spread, self.context.rank)][frame]

    def my_rows(self, spread: Spread, frame: str) -> torch.Tensor:
        """[S] int64: `my_row_numbers` on the device."""
        return on_device(self.my_row_numbers(spread, frame), self.context.device)

    def read(self, reads: tuple[str, ...], value: str) -> Any:
        """The buffer among an event's reads that holds `value`."""
        return self.buffers.get(next(b for b in reads if split_buffer(b)[0] == value))

    def write(self, value: str, spread: str, ids: torch.Tensor, data: torch.Tensor) -> None:
        """Store a buffer. ids: ascending row or prompt numbers ([0] at batch level). data: their entries, one id after
        another."""
        sizes = self.rows.sizes(self.context.values[value], ids)
        self.buffers.put(f"{value}@{spread}", RaggedRows(ids, sizes, data))

    def write_number(self, value: str, spread: str, number: float) -> None:
        """A number of the whole batch, in float64."""
        device = self.context.device
        self.write(value, spread, torch.zeros(1, dtype=torch.int64, device=device),
                   torch.tensor([number], dtype=torch.float64, device=device))

    def set_lengths(self, frame: str, lens: RowLengths) -> None:
        """The lengths of all rows of a frame, which every rank that needs them now knows; their tokens are counted."""
        self.rows.set_lengths(frame, lens)
        record = self.context.frames[frame]
        made_before = record.selected_from or frame in self.context.derived  # these tokens are counted already
        if made_before or not record.max_response_tokens:
            return
        if not frame.endswith(ROLLOUTS):
            self.tokens += sum(lens.to_list("tokens"))
            return
        begun = record.count // record.iterations
        before = self.lens_before.get(frame, torch.zeros_like(lens.response))
        still = torch.cat([torch.zeros_like(before[:begun]), before[:-begun]])  # as this step numbers them
        self.sampled[frame] = int((lens.response - still)[lens.response > 0].sum())
        self.lens_before[frame] = lens.response
        self.tokens += int(lens.prompt[:begun].sum()) + self.sampled[frame]

    def ids_of_tokens(self, reads: tuple[str, ...], value: str, rows: torch.Tensor) -> torch.Tensor:
        """[R, k] int64: a value of ids at entry level, among an event's reads, at the response tokens of some rows."""
        ids: torch.Tensor = self.read(reads, value).select(rows).data
        return ids.view(-1, self.context.values[value].width)

    def siblings(self, frames: Sequence[str], model: str, layout: Layout) -> Siblings | None:
        """The rows of a call's frames, which have the same rows, that share a prompt; None if no two do."""
        sources = [self.context.prompt_sources.get(f) for f in frames]
        runs = [s.run for s in sources if s is not None]
        if len(runs) < len(sources) or gcd(*runs) == 1 or not shares_prompts(self.context.models[model], layout):
            return None
        prompts = (self.rows.lens[f].prompts() for f in frames)
        return Siblings(gcd(*runs), [sum(x) for x in zip(*prompts, strict=True)])

    def packed(self, frame: str, tokens: RaggedRows, rows: torch.Tensor, numbers: Rows | None = None) -> PackedBatch:
        """The sequences of some rows, packed. numbers: the rows on the host, if it knows them."""
        lens, source = self.rows.lens[frame], self.context.prompt_sources.get(frame)
        on_host = None if numbers is None else lens.of_rows(numbers)
        data = tokens.select(rows, None if on_host is None else sum(map(sum, on_host))).data
        own = None
        if self.context.frames[frame].max_turns:
            data, own = unmarked(data)
        prompts = tuple((source.frame, row // source.run) for row in numbers) if numbers and source else None
        return PackedBatch(rows, lens.prompt[rows], lens.response[rows], data, own, on_host=on_host, prompts=prompts)
