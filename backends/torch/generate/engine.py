"""Runs the batches of `scheduler.py` on one rank: prompts into slots, then one more token for each sequence of a group.

In: a batch, and the hidden states of the stage before. Out: hidden states for the next stage, or, on the last stage,
the sampled tokens.

The next token, how many there are and which sequences have finished are known on the device; the host polls for the
last only where the batch says so. Until then a finished sequence stays in its batch: what is sampled for it is dropped,
and its keys and values go where nothing is read.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch

from rldsl.backends.torch.generate.decode_state import DecodeState
from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.kept_cache import CacheKeeper, KeptCache
from rldsl.backends.torch.generate.kv_cache import DecodeAttention, PrefillAttention
from rldsl.backends.torch.generate.sampling import Sampler
from rldsl.backends.torch.generate.scheduler import DecodeBatch, MicroBatchGroup, PrefillBatch, Scheduler
from rldsl.backends.torch.generate.stop_conditions import StopStrings
from rldsl.backends.torch.kernels import sampled_tokens
from rldsl.backends.torch.kernels.sampled_tokens import Appender
from rldsl.backends.torch.model.attention import VarlenAttention
from rldsl.backends.torch.model.stage import Stage
from rldsl.runtime.backend import PackedBatch, Prefix
from rldsl.runtime.store import offsets_within

ScheduledBatch = PrefillBatch | DecodeBatch


@dataclass
class Engine:
    """One generate call on one rank."""

    stage: Stage                      # the model's layers on this rank
    prompts: PackedBatch              # of all sequences
    sampler: Sampler | None           # on the last stage
    stop_strings: StopStrings | None  # None: only end-of-sequence tokens and lengths end a response
    min_new_tokens: int               # tokens that a response has before it may end
    max_new_tokens: int               # tokens after which a response ends
    scheduler: Scheduler              # decides what each group runs next, on the host
    state: DecodeState                # everything on the device that the call writes
    sampled_before: torch.Tensor      # [N] int64: tokens of each response that earlier calls sampled
    keeper: CacheKeeper | None = None  # collects keys and values of what has finished, for a later call
    prefix: Prefix | None = None      # where the keys and values of the prompts lie; None: they are computed

    def __post_init__(self) -> None:
        self.prompt_starts = self.prompts.prompt_lens.cumsum(0) - self.prompts.prompt_lens  # [N]
        vision = self.stage.vision
        # [N]: what a token after a prompt has as its position, less its place; None: its place is its position
        self.shifts = vision.shifts(self.prompts.tokens, self.prompts.prompt_lens) if vision else None
        self.append: Appender | None = None  # in one call, where there are such kernels
        if self.stop_strings is None and sampled_tokens.takes(self.stage.device):
            self.append = self.state.appender()
        self.num_prefilled = 0  # tokens of prompts that went through the model
        self.last_prompt_hidden: torch.Tensor | None = None  # [1, H] at the last token of the prompt that ran last

    def num_tokens(self, batch: ScheduledBatch) -> int:
        """Tokens that go through the model."""
        if isinstance(batch, DecodeBatch):
            return batch.batch_size
        return sum(self.scheduler.prompt_lens[i] for i in batch.new_prompts)

    def num_sequences(self, batch: ScheduledBatch) -> int:
        """Sequences that get a token."""
        return batch.batch_size if isinstance(batch, DecodeBatch) else len(batch.slots)

    def recv_buffer(self, group: MicroBatchGroup, batch: ScheduledBatch) -> torch.Tensor:
        """[tokens, H] for the hidden states of the stage before. Decode steps of a group always use the same buffer, as
        captured steps need it."""
        decoding, buffers, stage = isinstance(batch, DecodeBatch), self.state.recv_buffers, self.stage
        key = group.start, self.num_tokens(batch)
        if decoding and key in buffers:
            return buffers[key]
        buffer = torch.empty(key[1], stage.hidden_size, dtype=stage.residual_dtype, device=stage.device)
        if decoding:
            buffers[key] = buffer
        return buffer

    def run(self, group: MicroBatchGroup, batch: ScheduledBatch, received: torch.Tensor | None
            ) -> tuple[torch.Tensor, ...]:
        """(hidden states [tokens, H],), or on the last stage (tokens, log-probs) [sequences] each; () if the batch has
        no tokens to run."""
        if isinstance(batch, PrefillBatch):
            return self._prefill(batch, received)
        return self._decode(group, batch, received)

    def record_samples(self, group: MicroBatchGroup, batch: ScheduledBatch, tokens: torch.Tensor,
                       logprobs: torch.Tensor) -> bool:
        """Take over what was sampled for a batch, on every rank of the shard. tokens, logprobs: [sequences]. Returns
        whether a sequence may have ended; False only where it is known that none has."""
        slots: slice | torch.Tensor
        if isinstance(batch, DecodeBatch):
            slots = slice(group.start, group.start + batch.batch_size)
        else:
            slots = torch.tensor(batch.slots, device=tokens.device)
        append = self.append if isinstance(slots, slice) else None
        if append is not None:
            stopped = append(group.start, tokens.contiguous(), logprobs.float().contiguous())
            if not stopped and self.scheduler.poll_every == 1:  # nor since the poll before
                return False
        else:
            self.state.slots.token[slots], self.state.slots.logprob[slots] = tokens, logprobs
            if isinstance(slots, slice) and self.stop_strings is None:
                self.state.bookkeeping((group.start, len(tokens)), lambda: self._append_tokens(slots))
            else:
                self._append_tokens(slots)
        if isinstance(batch, PrefillBatch) or batch.poll:
            self._poll(group, records=append is None)
        return True

    def _append_tokens(self, at: slice | torch.Tensor) -> tuple[()]:
        """Append the sampled tokens of some slots to the responses of their sequences, as far as these are active."""
        slots, responses = self.state.slots, self.state.responses
        seq_id, count, active, tokens = slots.seq_id[at], slots.num_generated[at], slots.active[at], slots.token[at]
        # tokens of inactive sequences go to the last column, which is dropped
        places = seq_id * (self.max_new_tokens + 1) + torch.where(active, count, self.max_new_tokens)
        responses.tokens.view(-1).index_copy_(0, places, tokens)
        responses.logprobs.view(-1).index_copy_(0, places, slots.logprob[at])
        count = count + active
        finished = (tokens[:, None] == self.state.eos_ids).any(-1)
        if self.stop_strings is not None:
            long_enough = count + self.sampled_before[seq_id] >= self.min_new_tokens
            finished |= self.stop_strings.hit(responses.tokens[seq_id], count, seq_id) & long_enough
        finished &= active
        slots.finished[at] = slots.finished[at] | finished
        slots.num_generated[at] = count
        slots.active[at] = active & ~finished & (count < self.max_new_tokens)
        return ()

    def _poll(self, group: MicroBatchGroup, records: bool) -> None:
        """Ask the device which sequences of a group have finished, and free their slots. records: whether to record
        how long these are, which the one call of `append` does as well."""
        slots, responses = self.state.slots, self.state.responses
        active = slots.active[group.start : group.start + group.size].tolist()
        freed = self.scheduler.retire(group, [not x for x in active])
        if freed and (records or self.keeper is not None):
            at = torch.tensor(freed, device=self.prompts.tokens.device)
            if records:
                responses.lengths[slots.seq_id[at]] = slots.num_generated[at]
                responses.finished[slots.seq_id[at]] = slots.finished[at]
            if self.keeper is not None:  # the last sampled token has no keys and values
                self.keeper.keep(self.state.cache, freed, slots.seq_id[at],
                                 slots.last_prompt_pos[at] + slots.num_generated[at])

    def _prefill(self, batch: PrefillBatch, received: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        device, prompts, shared = self.prompts.tokens.device, self.prompts, batch.num_shared
        slots = torch.tensor(batch.slots, device=device)
        seq_ids = torch.arange(batch.first_seq, batch.first_seq + len(batch.slots), device=device)
        self._assign_slots(slots, seq_ids)
        # The first num_shared sequences repeat the prompt with which the batch before ended: their KV is copied from
        # source_slot, and their first token is sampled from last_prompt_hidden (prefix caching, in vLLM).
        if shared:
            self.state.cache.copy_slots([batch.source_slot] * shared, batch.slots[:shared],
                                        self.scheduler.prompt_lens[batch.first_seq])
        # how many new prompts there are up to each sequence
        prompt_count = torch.tensor([bisect_right(batch.new_prompts, batch.first_seq + i) for i in range(len(slots))],
                                    device=device)
        hidden = last_hidden = None
        if batch.new_prompts:
            new = torch.tensor(batch.new_prompts, device=device)
            lengths = prompts.prompt_lens[new]
            self.num_prefilled += self.num_tokens(batch)
            tokens = prompts.tokens[self.prompt_starts[new].repeat_interleave(lengths) + offsets_within(lengths)]
            attention = PrefillAttention(self.state.cache, lengths, slots[shared:], prompt_count[shared:] - 1)
            positions, vision = attention.positions, self.stage.vision
            if vision is not None:
                vision.mark(attention, tokens)
                positions = vision.positions(tokens, positions)
            hidden = self.stage.forward(tokens, positions, attention, received)
            last_hidden = hidden[lengths.cumsum(0) - 1]
        if not self.stage.last:
            return () if hidden is None else (hidden,)
        candidates = torch.cat([x for x in (self.last_prompt_hidden, last_hidden) if x is not None])
        # candidates[0] is the last prompt of the batch before, if there is one; a sequence that repeats it has a
        # prompt_count of 0. Without it (in the first batch) counts start at 1, so indices are counts minus 1.
        candidate = prompt_count - int(self.last_prompt_hidden is None)
        self.last_prompt_hidden = candidates[-1:]
        return self._sample(candidates[candidate], slots)

    def _assign_slots(self, at: torch.Tensor, seq_ids: torch.Tensor) -> None:
        slots = self.state.slots
        slots.seq_id[at], slots.last_prompt_pos[at] = seq_ids, self.prompts.prompt_lens[seq_ids] - 1
        slots.num_generated[at], slots.active[at], slots.finished[at] = 0, True, False
        if self.shifts is not None:
            slots.shift[at] = self.shifts[seq_ids]
        slots.sampled_before[at] = self.sampled_before[seq_ids]
        if len(slots.draws):
            slots.draws[at] = self._last_stage_sampler().draws(
                self.prompts.rows[seq_ids], self.sampled_before[seq_ids], self.max_new_tokens + 1)

    def _attach(self, attached: tuple[tuple[int, int], ...]) -> None:
        """Admit sequences whose prompts are in a kept cache, up to their last tokens: the next step runs these."""
        if self.prefix is None:
            raise RuntimeError("there is no kept cache")
        slots, seq_ids = torch.tensor(attached, device=self.prompts.tokens.device).unbind(1)
        self._assign_slots(slots, seq_ids)
        before = self.prompts.prompt_lens[seq_ids] - 1
        self.state.slots.token[slots] = self.prompts.tokens[self.prompt_starts[seq_ids] + before]
        kept: KeptCache = self.prefix.cache
        kept.fill(self.state.cache, self.prefix.sequences[seq_ids], slots, before)
        self.num_prefilled += len(attached)

    def _decode(self, group: MicroBatchGroup, batch: DecodeBatch, received: torch.Tensor | None
                ) -> tuple[torch.Tensor, ...]:
        cache, slots = self.state.cache, self.state.slots
        if batch.attached:
            self._attach(batch.attached)
        if batch.slot_moves:
            sources, targets = zip(*batch.slot_moves, strict=True)
            cache.copy_slots(sources, targets, batch.kv_len)
            slots.move(sources, targets)
        first, end, kv_len = group.start, group.start + batch.batch_size, DynamicSize(batch.kv_len)

        def step() -> tuple[torch.Tensor, ...]:
            positions = slots.last_prompt_pos[first:end] + slots.num_generated[first:end]
            attention = DecodeAttention(cache, first, positions, kv_len, not self.stage.invariant,
                                        self.stage.ordered_heads)
            if self.shifts is not None:
                positions = positions + slots.shift[first:end]
            hidden = self.stage.forward(slots.token[first:end], positions, attention, received)
            return self._sample(hidden, slice(first, end)) if self.stage.last else (hidden,)

        return self.state.decode_steps((first, batch.batch_size), step, kv_len)

    def _sample(self, hidden: torch.Tensor, at: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots, count = self.state.slots, self.state.slots.num_generated[at]
        draws = slots.draws[at].gather(1, count[:, None])[:, 0] if len(slots.draws) else None
        in_response = count + slots.sampled_before[at] if self.min_new_tokens else count
        return self._last_stage_sampler().sample(hidden, in_response, draws)

    def _last_stage_sampler(self) -> Sampler:
        if self.sampler is None:
            raise RuntimeError("only the last pipeline stage samples")
        return self.sampler


def dummy_pass(stage: Stage) -> None:
    """A pass of one token whose result is dropped: other ranks need this rank's experts."""
    one = torch.ones(1, dtype=torch.long, device=stage.device)
    hidden = None if stage.first else torch.zeros(1, stage.hidden_size, dtype=stage.residual_dtype, device=stage.device)
    stage.forward(one - 1, one - 1, VarlenAttention(one), hidden)
