"""What one rank does for a piece of work of `scheduler.py`: prompts into slots, one more token for the sequences of a
lane.

In: work, and the hidden states of the stage before. Out: hidden states for the next stage, or, of the last one, the
tokens that were sampled. Which token comes next, how many there are and which sequences have ended is known on the
device; the host asks for the last where the work says so. A sequence that has ended since goes on until then: what is
sampled for it is dropped, and it writes where nothing is read.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from rldsl.backends.torch.generate.decode_state import Desk
from rldsl.backends.torch.generate.kv_cache import Decode, Prefill
from rldsl.backends.torch.generate.sampling import Sampler
from rldsl.backends.torch.generate.scheduler import Begin, Lane, Slots, Step
from rldsl.backends.torch.generate.stop_conditions import StopStrings
from rldsl.backends.torch.model.attention import Varlen
from rldsl.backends.torch.model.stage import Stage

from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.store import within

Work = Begin | Step


@dataclass
class Engine:
    """prompts: of all sequences. sampler: of the last stage, None elsewhere. stops: texts that end a sequence. slots:
    what to do; starts [N]: where prompts begin."""

    stage: Stage
    prompts: PackedBatch
    sampler: Sampler | None
    stops: StopStrings | None
    shortest: int
    longest: int
    slots: Slots
    desk: Desk

    def __post_init__(self) -> None:
        self.slab, self.seats, self.progress = self.desk.slab, self.desk.seats, self.desk.progress
        self.starts = self.prompts.prompt_lens.cumsum(0) - self.prompts.prompt_lens
        self.open: torch.Tensor | None = None  # the last hidden state [1, H] of the prompt that was last begun

    def size(self, work: Work) -> int:
        """Tokens that go through the model."""
        return work.rows if isinstance(work, Step) else sum(self.slots.lens[i] for i in work.fresh)

    def sequences(self, work: Work) -> int:
        """Sequences of which each gets a token."""
        return work.rows if isinstance(work, Step) else len(work.slots)

    def room(self, lane: Lane, work: Work) -> torch.Tensor:
        """For the hidden states of the stage before; of a lane's steps always the same, as recordings need it."""
        shape, stage = (self.size(work), self.stage.hidden), self.stage
        if isinstance(work, Step) and (lane.start, work.rows) in self.desk.rooms:
            return self.desk.rooms[lane.start, work.rows]
        made = torch.empty(shape, dtype=stage.compute_dtype, device=stage.device)
        if isinstance(work, Step):
            self.desk.rooms[lane.start, work.rows] = made
        return made

    def work(self, lane: Lane, work: Work, arriving: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """(hidden states,), or on the last stage (tokens, log-probs) for each sequence; () where nothing is run."""
        return self._begin(work, arriving) if isinstance(work, Begin) else self._step(lane, work, arriving)

    def absorb(self, lane: Lane, work: Work, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Take note of what was sampled; on every rank of the shard."""
        at: slice | torch.Tensor = slice(lane.start, lane.start + work.rows) if isinstance(work, Step) else \
            torch.tensor(work.slots, device=tokens.device)
        self.seats.token[at], self.seats.logprob[at] = tokens, logprobs
        if isinstance(work, Step) and self.stops is None:
            self.desk.notes((lane.start, work.rows), lambda: self._note(at))
        else:
            self._note(at)
        if isinstance(work, Begin) or work.look:
            self._look(lane)

    def _note(self, at: slice | torch.Tensor) -> tuple[()]:
        """What was sampled for some slots belongs to their sequences, as far as these have not ended."""
        seats, progress = self.seats, self.progress
        which, made, live, tokens = seats.which[at], seats.made[at], seats.live[at], seats.token[at]
        place = which * (self.longest + 1) + torch.where(live, made, self.longest)
        progress.tokens.view(-1).index_copy_(0, place, tokens)
        progress.logprobs.view(-1).index_copy_(0, place, seats.logprob[at])
        made = made + live
        over = (tokens[:, None] == self.desk.eos_ids).any(-1)
        if self.stops is not None:
            over |= self.stops.hit(progress.tokens[which], made) & (made >= self.shortest)
        over &= live
        seats.ended[at] = seats.ended[at] | over
        seats.made[at] = made
        seats.live[at] = live & ~over & (made < self.longest)
        return ()

    def _look(self, lane: Lane) -> None:
        """Ask the device which sequences have ended; their slots are free."""
        live = self.seats.live[lane.start : lane.start + lane.size].tolist()
        found = self.slots.ended(lane, [not x for x in live])
        if found:
            at = torch.tensor(found, device=self.prompts.tokens.device)
            self.progress.lengths[self.seats.which[at]] = self.seats.made[at]
            self.progress.done[self.seats.which[at]] = self.seats.ended[at]

    def _begin(self, work: Begin, arriving: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        device, prompts = self.prompts.tokens.device, self.prompts
        slots = torch.tensor(work.slots, device=device)
        which = torch.arange(work.first, work.first + len(work.slots), device=device)
        self._sit(slots, which)
        if work.again:
            self.slab.copy([work.source] * work.again, work.slots[: work.again], self.slots.lens[work.first])
        # how many new prompts there are up to each sequence
        count = torch.tensor([bisect_right(work.fresh, work.first + i) for i in range(len(slots))], device=device)
        hidden = found = None
        if work.fresh:
            fresh = torch.tensor(work.fresh, device=device)
            each = prompts.prompt_lens[fresh]
            tokens = prompts.tokens[self.starts[fresh].repeat_interleave(each) + within(each)]
            packing = Prefill(self.slab, each, slots[work.again :], count[work.again :] - 1)
            hidden = self.stage.forward(tokens, packing.positions, packing, arriving)
            found = hidden[each.cumsum(0) - 1]
        if not self.stage.last:
            return () if hidden is None else (hidden,)
        known = torch.cat([x for x in (self.open, found) if x is not None])
        at = count - int(self.open is None)
        self.open = known[-1:]
        return self._sample(known[at], slots)

    def _sit(self, slots: torch.Tensor, which: torch.Tensor) -> None:
        seats = self.seats
        seats.which[slots], seats.before[slots] = which, self.prompts.prompt_lens[which] - 1
        seats.made[slots], seats.live[slots], seats.ended[slots] = 0, True, False
        if len(seats.draws):
            assert self.sampler is not None
            seats.draws[slots] = self.sampler.draws(self.prompts.rows[which], self.longest + 1)

    def _step(self, lane: Lane, work: Step, arriving: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        if work.moves:
            sources, into = zip(*work.moves)
            self.slab.copy(sources, into, work.width)
            self.seats.move(sources, into)
        first, last, seats = lane.start, lane.start + work.rows, self.seats

        def run() -> tuple[torch.Tensor, ...]:
            positions = seats.before[first:last] + seats.made[first:last]
            packing = Decode(self.slab, first, positions, work.width)
            hidden = self.stage.forward(seats.token[first:last], positions, packing, arriving)
            return self._sample(hidden, slice(first, last)) if self.stage.last else (hidden,)

        return self.desk.steps((first, work.rows, work.width), run)

    def _sample(self, hidden: torch.Tensor, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.sampler is not None
        made = self.seats.made[at]
        draws = self.seats.draws[at].gather(1, made[:, None])[:, 0] if len(self.seats.draws) else None
        return self.sampler.next(hidden, made, draws)

    def idle(self) -> None:
        """A pass of one token that nobody needs: other ranks need the experts of this one."""
        one = torch.ones(1, dtype=torch.long, device=self.stage.device)
        hidden = None if self.stage.first else torch.zeros(1, self.stage.hidden, dtype=self.stage.compute_dtype,
                                                           device=self.stage.device)
        self.stage.forward(one - 1, one - 1, Varlen(one), hidden)
