"""Conversations with environments by one shard: many turns in one KV cache.

In: rows, and the environments that answer. Out: what both said, row by row, with the log-probs of the model's tokens.

While the environment of a conversation works, its slot of the KV cache waits and the others keep decoding; an answer
is prefilled after what the slot holds. With `waiting="keep"` a conversation has its slot from its beginning to its
end. Otherwise more conversations are alive than there are slots: one gets a slot when it has tokens to run, and may
lose it while it waits. What its slot holds goes to host memory ("offload"), or all that was said is prefilled again
("recompute"). Each pass takes slots that are ready, so its shapes change from pass to pass and none is captured: that
is what this engine is slower by than that of single responses.
Every rank of the shard makes the same decisions, since all learn the same at the same pass (`conversation_ticks.py`).
Of a conversation with several branches (`conversation_state.py`), the one under way is in the slot. Another one that
the agent turns to is prefilled, all of it.
Invariant: what is sampled depends on (seed, step, conversation, position among its own tokens) and the model, not on
when environments answer, except for the rounding of passes of other shapes, which `invariant=true` excludes. A branch
is sampled, and its log-probs are those, under its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from rldsl.backends.torch.generate.conversation_state import LiveConversations, Slot
from rldsl.backends.torch.generate.conversation_ticks import run_to_the_end
from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.backends.torch.generate.sampling import Sampler
from rldsl.backends.torch.generate.slot_attention import SlotAttention
from rldsl.backends.torch.generate.stop_conditions import StopStrings, tokenizer_of
from rldsl.backends.torch.model.stage import Stage
from rldsl.diag import internal_error
from rldsl.memory.decode_shapes import MAX_PREFILL_TOKENS, live_conversations
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.backend import Axes, ConversationOutput, Talk
from rldsl.runtime.draws import uniform
from rldsl.runtime.host_numbers import on_device

PASSES_TO_WAIT = 8  # that a conversation keeps its slot for while it waits, if others can decode


@torch.no_grad()
def converse(stage: Stage, axes: Axes, rows: torch.Tensor, sampling: Sampling, limits: Conversation,
             talk: Talk | None, *, tokenizer_dir: str, seed: int, step: int, max_num_seqs: int,
             waiting: Waiting = "keep") -> ConversationOutput:
    """See `Shard.converse`."""
    tokenizer, eos_ids = tokenizer_of(tokenizer_dir)
    device, numbers = stage.device, rows.tolist()
    sampler = Sampler(stage, sampling, seed, step, torch.tensor(eos_ids, device=device)) if stage.last else None
    engine = Engine(
        limits=limits, talk=talk, stage=stage, sampler=sampler, sampling=sampling, eos_ids=frozenset(eos_ids),
        stop_strings=StopStrings(sampling.stop, tokenizer) if sampling.stop else None,
        cache=KVCache(min(max_num_seqs or len(numbers), len(numbers)), limits.max_tokens, device),
        num_stages=axes.pp.size, waiting=waiting)
    engine.expect(numbers)
    run_to_the_end(engine, axes)
    return engine.output(device)


@dataclass(kw_only=True)
class Engine(LiveConversations):
    """One call on one rank. All decisions are made on the host, which reads the sampled tokens after each pass."""

    stage: Stage  # the model's layers on this rank
    sampler: Sampler | None  # of next tokens, on the last stage
    stop_strings: StopStrings | None  # that end a turn, besides end-of-sequence tokens
    sampling: Sampling  # of one turn
    eos_ids: frozenset[int]  # that end a turn
    cache: KVCache  # a slot for each conversation at a time
    num_stages: int  # of the pipeline, and so how many passes are under way
    waiting: Waiting = "keep"  # what a slot does while its environment works
    free: list[int] = field(default_factory=list)  # slots of the cache, the next one last

    def __post_init__(self) -> None:
        self.free = list(reversed(range(self.cache.num_slots)))

    @property
    def has_tokens(self) -> bool:
        """Whether a pass is under way, or could begin."""
        return not all(slot.waits for slot in self.slots.values())

    def schedule(self, number: int) -> list[Slot]:
        """Begin conversations, and take slots for a pass: those that are ready for longest, either with one token each
        or with answers to prefill. number: of the pass."""
        self.begin(live_conversations(self.cache.num_slots, self.waiting), number)
        for slot in sorted((s for s in self.slots.values() if s.ready and s.index < 0), key=lambda s: (s.since, s.seq)):
            if self.free or self._give_away(number):
                self._place(slot)
        ready = sorted((s for s in self.slots.values() if s.ready and not s.running and s.index >= 0),
                       key=lambda s: (s.since, len(s.ready) > 1, s.seq))
        running = sum(s.running for s in self.slots.values())
        share = -(-(len(ready) + running) // self.num_stages)  # so that every stage has a pass of the same size
        batch: list[Slot] = []
        for slot in ready:
            if (len(slot.ready) > 1) != (len(ready[0].ready) > 1):
                continue
            full = sum(len(s.ready) for s in batch) + len(slot.ready) > MAX_PREFILL_TOKENS
            if batch and (len(batch) == share or full):
                break
            batch.append(slot)
        for slot in batch:
            slot.running = True
            self.begin_turn(slot)
        return batch

    def _place(self, slot: Slot) -> None:
        """Give a free slot of the cache to a conversation, with what it had in it before."""
        slot.index = self.free.pop()
        self.cache.onload(slot.index, slot.cached, slot.offloaded)
        slot.offloaded = ()

    def images_of(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        return self.stage.vision.ends(tokens) if self.stage.vision is not None else []

    def _give_away(self, number: int) -> bool:
        """Free the slot of the conversation that waits for longest. False if none waits for long enough: as long as
        another can decode, for some passes, since most tools answer soon. number: of the pass."""
        placed = [s for s in self.slots.values() if s.index >= 0]
        least = PASSES_TO_WAIT if not all(s.waits for s in placed) else 0
        waiting = [s for s in placed if s.waits and number - s.since >= least]
        if not waiting:
            return False
        slot = min(waiting, key=lambda s: (s.since, s.seq))
        if self.waiting == "offload":
            slot.offloaded = self.cache.offload(slot.index, slot.cached)
        else:
            slot.cached = 0  # all of it is prefilled with the answer
        self.leave_cache(slot)
        slot.given_away += 1
        return True

    def leave_cache(self, slot: Slot) -> None:
        if slot.index >= 0:
            self.free.append(slot.index)
        slot.index = -1

    def forward(self, batch: Sequence[Slot], received: torch.Tensor | None) -> torch.Tensor:
        """[tokens, H] hidden states of the slots' tokens. received: those of the stage before."""
        counts = [len(s.ready) for s in batch]
        attention = SlotAttention(self.cache, [s.index for s in batch], [s.cached for s in batch], counts)
        tokens = on_device([t for s in batch for t in s.ready], self.stage.device)
        positions, vision = attention.positions, self.stage.vision
        if vision is not None:
            vision.mark(attention, tokens)
            shift = on_device([s.shift for s in batch for _ in s.ready], self.stage.device)
            positions = vision.positions(tokens, positions, attention.offsets, shift)
        return self.stage.forward(tokens, positions, attention, received)

    def sample(self, batch: Sequence[Slot], hidden: torch.Tensor) -> torch.Tensor:
        """[2, slots] float64: a token for each slot, and its log-prob. On the rank that talks, environments hear the
        turns that end with it."""
        if self.sampler is None:
            raise internal_error("only the last pipeline stage samples", "generate")
        numbers = zip(*((len(s.ready), s.in_turn, s.row, s.num_sampled) for s in batch), strict=True)
        ready, generated, rows, positions = on_device([*chain(*numbers)], self.stage.device).view(4, -1).unbind()
        draws = None
        if not self.sampling.greedy:
            draws = uniform(self.sampler.seed, self.sampler.step, rows, positions)
        chosen = self.sampler.sample(hidden[ready.cumsum(0) - 1], generated, draws)
        sampled = torch.stack([x.double() for x in chosen])  # exact
        if self.talk is not None:
            for slot, token, logprob in zip(batch, *sampled.tolist(), strict=True):
                turn, logprobs = [*slot.turn, int(token)], slot.branch.logprobs
                if (ended := self._ended(slot, turn)) is not None:
                    said = logprobs[len(logprobs) - slot.in_turn :]
                    self.talk.said(slot.row, turn, not ended, [*said, logprob])
        return sampled

    def record(self, batch: Sequence[Slot], sampled: torch.Tensor, number: int) -> None:
        """Take over what was sampled for a pass, on every rank of the shard. number: of the pass that comes next."""
        for slot, token, logprob in zip(batch, *sampled.tolist(), strict=True):
            ended = self._ended(slot, [*slot.turn, int(token)])
            slot.running, slot.since, slot.cached = False, number, slot.cached + len(slot.ready)
            slot.branch.logprobs.append(logprob)
            slot.in_turn += 1
            slot.append([int(token)], own=True)
            if ended is not None:
                self.end_turn(slot)

    def _ended(self, slot: Slot, turn: list[int]) -> bool | None:
        """Whether a turn that has just got its last token ended of itself; None if it continues."""
        if turn[-1] in self.eos_ids or self._hits_stop_string(turn):
            return True
        full = len(slot.branch.tokens) + 1 == self.limits.max_tokens
        return False if len(turn) == self.sampling.max_new_tokens or full else None

    def _hits_stop_string(self, turn: list[int]) -> bool:
        if self.stop_strings is None or len(turn) < self.sampling.min_new_tokens:
            return False
        device = self.stage.device
        return bool(self.stop_strings.hit(torch.tensor([turn], device=device),
                                          torch.tensor([len(turn)], device=device)).item())
