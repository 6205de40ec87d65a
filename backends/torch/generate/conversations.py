"""Conversations with environments on one rank: many turns in one KV cache.

In: rows, and the environments that answer. Out: what both said, row by row, with the log-probs of the model's tokens.

A conversation has a slot of the KV cache until it ends. While its environment works, the slot waits and the others go
on decoding; an answer is prefilled behind what the slot holds. Each pass takes whichever slots are ready, so its shapes
change from step to step and no step is captured: that is what this engine is slower by than that of single responses.
Invariant: what is sampled depends on (seed, step, row, position among the row's own tokens) and the model, not on when
environments answer, except for the rounding of passes of other shapes, which `invariant=true` excludes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.backends.torch.generate.sampling import Sampler
from rldsl.backends.torch.generate.stop_conditions import StopStrings, tokenizer_of
from rldsl.backends.torch.model.stage import Stage
from rldsl.diag import internal_error
from rldsl.memory.decode_shapes import MAX_PREFILL_TOKENS
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Conversation
from rldsl.plan.turns import STOPPED
from rldsl.runtime.backend import ConversationOutput, PackedBatch, Talk
from rldsl.runtime.draws import uniform
from rldsl.runtime.environments import Arrival, Stopped
from rldsl.runtime.store import offsets_within


@dataclass
class Slot:
    """A conversation and its place in the KV cache."""

    index: int  # in the cache
    row: int  # of the frame
    seq: int  # of the call: where its results go
    cached: int = 0  # tokens whose keys and values are in the cache
    ready: list[int] = field(default_factory=list)  # tokens to run next, the last of which predicts; none: it waits
    tokens: list[int] = field(default_factory=list)  # all that was said
    own: list[bool] = field(default_factory=list)  # which of them the model said
    logprobs: list[float] = field(default_factory=list)  # of the model's tokens
    turns: int = 0  # of the model, begun
    in_turn: int = 0  # tokens of the turn under way
    turn_sizes: list[int] = field(default_factory=list)  # tokens of each turn that has ended
    turn_rewards: dict[int, float] = field(default_factory=dict)  # turn, from 0 -> what the environment gave for it
    stopped: Stopped | None = None  # why it ended

    def append(self, ids: Sequence[int], own: bool) -> None:
        self.tokens += ids
        self.own += [own] * len(ids)
        self.ready = [*self.tokens[self.cached :]]


@torch.no_grad()
def converse(stage: Stage, rows: torch.Tensor, sampling: Sampling, limits: Conversation, talk: Talk, *,
             tokenizer_dir: str, seed: int, step: int, max_num_seqs: int) -> ConversationOutput:
    """See `Shard.converse`."""
    tokenizer, eos_ids = tokenizer_of(tokenizer_dir)
    device, numbers = stage.device, rows.tolist()
    engine = _Engine(stage, Sampler(stage, sampling, seed, step, torch.tensor(eos_ids, device=device)),
                     StopStrings(sampling.stop, tokenizer) if sampling.stop else None, sampling, limits, talk,
                     frozenset(eos_ids), KVCache(min(max_num_seqs or len(numbers), len(numbers)), limits.max_tokens,
                                                 device))
    done, turns = engine.run(numbers), limits.max_turns
    counts = torch.tensor([len(s.tokens) for s in done], dtype=torch.int64, device=device)
    responses = torch.tensor([len(s.logprobs) for s in done], dtype=torch.int64, device=device)
    batch = PackedBatch(rows, counts - responses, responses,
                        torch.tensor([t for s in done for t in s.tokens], dtype=torch.int64, device=device),
                        torch.tensor([x for s in done for x in s.own], dtype=torch.bool, device=device))
    return ConversationOutput(
        batch, torch.tensor([x for s in done for x in s.logprobs], dtype=torch.float32, device=device),
        torch.tensor([engine.rewards[s.row] for s in done], dtype=torch.float32, device=device),
        torch.tensor([s.turns for s in done], dtype=torch.int64, device=device),
        torch.tensor([s.turn_sizes + [0] * (turns - s.turns) for s in done], dtype=torch.int64, device=device),
        torch.tensor([[s.turn_rewards.get(i, 0.0) for i in range(turns)] for s in done], dtype=torch.float32,
                     device=device),
        torch.tensor([STOPPED[s.stopped or "done"] for s in done], dtype=torch.int64, device=device))


@dataclass
class _Engine:
    """One call. All decisions are made on the host, which reads the sampled tokens after each pass."""

    stage: Stage  # the model
    sampler: Sampler  # of its next tokens
    stop_strings: StopStrings | None  # that end a turn, besides end-of-sequence tokens
    sampling: Sampling  # of one turn
    limits: Conversation  # of a conversation
    talk: Talk  # the environments
    eos_ids: frozenset[int]  # that end a turn
    cache: KVCache  # a slot for each conversation at a time
    slots: dict[int, Slot] = field(default_factory=dict)  # row -> its slot, until it ends
    rewards: dict[int, float] = field(default_factory=dict)  # row -> what its environment gave in the end

    def run(self, rows: Sequence[int]) -> list[Slot]:
        """The conversations of all rows, in their order."""
        waiting = [Slot(-1, row, i) for i, row in reversed(list(enumerate(rows)))]
        free, done = list(reversed(range(self.cache.num_slots))), list[Slot]()
        while waiting or self.slots:
            while free and waiting:
                slot = waiting.pop()
                slot.index = free.pop()
                self.slots[slot.row] = slot
                self.talk.begin(slot.row)
            for arrival in self.talk.arrivals(wait=not any(s.ready for s in self.slots.values())):
                if (ended := self._arrived(arrival)) is not None:
                    done.append(ended)
                    free.append(ended.index)
            for batch in self._passes():
                self._run(batch)
        return sorted(done, key=lambda s: s.seq)

    def _arrived(self, arrival: Arrival) -> Slot | None:
        """Take over what an environment said. Returns the slot of a conversation that ended."""
        slot = self.slots.get(arrival.row)
        if slot is None or slot.ready:
            raise internal_error(f"an environment answers in row {arrival.row}, which was not asked", "generate")
        if arrival.turn_reward is not None and slot.turns:
            slot.turn_rewards[slot.turns - 1] = arrival.turn_reward
        if not slot.tokens:  # the first context stays, whatever ends the conversation
            slot.append(arrival.tokens[: self.limits.max_tokens], own=False)
            slot.ready = slot.ready if len(arrival.tokens) < self.limits.max_tokens and not arrival.ended else []
        if arrival.ended:
            slot.stopped = arrival.stopped
            self.rewards[slot.row] = sum(slot.turn_rewards.values()) if arrival.reward is None else arrival.reward
            return self.slots.pop(slot.row)
        fits = len(slot.tokens) + len(arrival.tokens) < self.limits.max_tokens
        if 0 < slot.turns < self.limits.max_turns and fits:
            slot.append(arrival.tokens, own=False)
        if not slot.ready:
            self.talk.finish(slot.row, "max_turns" if slot.turns == self.limits.max_turns else "max_tokens")
        return None

    def _passes(self) -> Iterator[list[Slot]]:
        """The slots that are ready, so many at a time that a pass is bounded: those that decode together first."""
        ready = sorted((s for s in self.slots.values() if s.ready), key=lambda s: (len(s.ready) > 1, s.index))
        batch: list[Slot] = []
        for slot in ready:
            full = sum(len(s.ready) for s in batch) + len(slot.ready) > MAX_PREFILL_TOKENS
            if batch and (full or len(batch[0].ready) == 1 < len(slot.ready)):
                yield batch
                batch = []
            batch.append(slot)
        if batch:
            yield batch

    def _run(self, batch: list[Slot]) -> None:
        """Run the tokens of some slots, sample one more for each, and end turns."""
        device = self.stage.device
        counts = [len(s.ready) for s in batch]
        attention = SlotAttention(self.cache, [s.index for s in batch], [s.cached for s in batch], counts)
        tokens = torch.tensor([t for s in batch for t in s.ready], device=device)
        hidden = self.stage.forward(tokens, attention.positions, attention, None)
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        draws = None
        if not self.sampling.greedy:
            position = torch.tensor([len(s.logprobs) for s in batch], device=device)
            rows = torch.tensor([s.row for s in batch], device=device)
            draws = uniform(self.sampler.seed, self.sampler.step, rows, position)
        for slot in batch:
            starts = slot.own[-1] is False
            slot.turns, slot.in_turn = slot.turns + starts, 0 if starts else slot.in_turn
        generated = torch.tensor([s.in_turn for s in batch], device=device)
        sampled, logprobs = (x.tolist() for x in self.sampler.sample(hidden[last], generated, draws))
        for slot, token, logprob in zip(batch, sampled, logprobs, strict=True):
            slot.cached += len(slot.ready)
            slot.logprobs.append(logprob)
            slot.in_turn += 1
            slot.append([token], own=True)
            ended = token in self.eos_ids or self._hits_stop_string(slot)
            if ended or slot.in_turn == self.sampling.max_new_tokens or len(slot.tokens) == self.limits.max_tokens:
                slot.ready = []
                slot.turn_sizes.append(slot.in_turn)
                self.talk.said(slot.row, slot.tokens[-slot.in_turn :], not ended, slot.logprobs[-slot.in_turn :])

    def _hits_stop_string(self, slot: Slot) -> bool:
        if self.stop_strings is None or slot.in_turn < self.sampling.min_new_tokens:
            return False
        device = self.stage.device
        turn = torch.tensor([slot.tokens[-slot.in_turn :]], device=device)
        return bool(self.stop_strings.hit(turn, torch.tensor([slot.in_turn], device=device)).item())


class SlotAttention:
    """Attention of new tokens at the end of what some slots hold, one slot after another."""

    def __init__(self, cache: KVCache, slots: Sequence[int], cached: Sequence[int], counts: Sequence[int]):
        """cached: tokens that each of `slots` has. counts: new tokens of each."""
        device = cache.device
        self.cache, self.slots, self.cached, self.counts = cache, slots, cached, counts
        sizes = torch.tensor(counts, device=device)
        self.positions = torch.tensor(cached, device=device).repeat_interleave(sizes) + offsets_within(sizes)
        at = cache.slot_offsets[torch.tensor(slots, device=device)]
        self.token_indices = at.repeat_interleave(sizes) + self.positions
        self.at = torch.tensor(slots, device=device)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}  # one for all layers with the same window

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        keys, values = self.cache.write(layer, k, v, self.token_indices)
        if max(self.counts) == 1:
            return self._decode(q, keys, values, scale, window)
        parts: list[torch.Tensor] = []
        first = 0
        for i, (slot, cached, count) in enumerate(zip(self.slots, self.cached, self.counts, strict=True)):
            own_keys, own_values = (x[slot : slot + 1, : cached + count].transpose(1, 2) for x in (keys, values))
            own = q[None, :, first : first + count]
            parts.append(F.scaled_dot_product_attention(
                own, own_keys, own_values, attn_mask=self._mask(i, window), scale=scale, enable_gqa=True)[0])
            first += count
        return torch.cat(parts, 1).transpose(0, 1)

    def _mask(self, i: int, window: int | None) -> torch.Tensor:
        """[1, 1, T, L] bool: what the new tokens of a slot see."""
        if (i, window) not in self._masks:
            end = self.cached[i] + self.counts[i]
            at = torch.arange(self.cached[i], end, device=self.cache.device)[:, None]
            columns = self.cache.columns[:end]
            visible = columns <= at if window is None else (columns <= at) & (columns > at - window)
            self._masks[i, window] = visible[None, None]
        return self._masks[i, window]

    def _decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
                window: int | None) -> torch.Tensor:
        """One token for each slot. The query heads that share a KV head take the place of query positions, as in
        `DecodeAttention`; the slots need not be neighbors, so what they hold is copied."""
        kv_len = max(self.cached) + 1
        own_keys, own_values = (x[self.at, :kv_len].transpose(1, 2) for x in (keys, values))
        query = q.transpose(0, 1).unflatten(1, (keys.shape[2], -1))  # [S, K, H / K, D]
        if (-1, window) not in self._masks:
            at, columns = self.positions[:, None], self.cache.columns[:kv_len]
            visible = columns <= at if window is None else (columns <= at) & (columns > at - window)
            self._masks[-1, window] = visible[:, None, None]
        out = F.scaled_dot_product_attention(query, own_keys, own_values, attn_mask=self._masks[-1, window],
                                             scale=scale)
        return out.flatten(1, 2)
