"""Continuous batching on the host: which sequence has which slot of the KV cache, and what a micro-batch group runs
next.

In: prompt lengths, which prompts repeat the one before, and, now and then, which sequences have finished.
Out: one `PrefillBatch` or `DecodeBatch` after another.
Invariant: every rank of a shard makes the same decisions, since all know the same.

A *micro-batch group* is a run of slots whose sequences go through the model together; a pipeline has one group for each
stage. Sequences are admitted in order, to whichever group has free slots, so the samples of one prompt are close in
time and share its prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from rldsl.memory.decode_shapes import MAX_PREFILL_TOKENS, MIN_CACHE_WIDTH, round_to_bucket, tokens_to_read


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences first_seq, first_seq + 1, ... are admitted to `slots`. Afterwards the host polls which have
    finished."""

    slots: tuple[int, ...]        # one for each sequence
    first_seq: int                # number of the first sequence
    num_shared: int               # how many of them, at the start, have the prompt of the sequence before them ...
    source_slot: int              # ... whose keys and values are in this slot
    new_prompts: tuple[int, ...]  # the other sequences whose prompt must be run; the rest repeat one of these


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token for each of the first `batch_size` slots of a group."""

    batch_size: int                          # slots, and so sequences
    kv_len: int                              # how many tokens of each slot are read
    slot_moves: tuple[tuple[int, int], ...]  # (from, to), before the step
    poll: bool                               # whether the host asks afterwards which sequences have finished
    # (slot, sequence), admitted before the moves: all but the last token of their prompts comes from a kept cache
    attached: tuple[tuple[int, int], ...] = ()
    repeats: int = 0  # steps of the same shape that follow, as long as no sequence ends


@dataclass
class MicroBatchGroup:
    """Slots start .. start + size."""

    start: int  # its first slot
    size: int  # its slots
    seq_ids: dict[int, int] = field(default_factory=dict)        # slot -> its sequence
    num_generated: dict[int, int] = field(default_factory=dict)  # slot -> tokens sampled, as far as the host knows
    steps_until_poll: int = 0  # decode steps until the host asks which sequences have finished

    def free_slots(self) -> list[int]:
        return [s for s in range(self.start, self.start + self.size) if s not in self.seq_ids]


class Scheduler:
    """The state of one generate call."""

    def __init__(self, prompt_lens: Sequence[int], shared_prefix: Sequence[bool], num_slots: int, num_groups: int,
                 max_new_tokens: int, poll_every: int, max_prompt_len: int = 0, cached: bool = False,
                 narrow: bool = False, stateful: bool = False):
        """prompt_lens: [N] tokens. shared_prefix: [N] whether a sequence has the prompt of the one before.
        poll_every: the most decode steps between two polls. max_prompt_len: tokens of the longest prompt of any call
        (0: unknown); calls with prompts of nearly the same length then get a KV cache of the same width. cached: the
        prompts are in a kept cache, so that a sequence begins with a decode step. narrow: steps read hardly more of the
        cache than they need, as on a CPU. stateful: a slot does not keep what its prompt left, so that a later batch
        runs a prompt again."""
        self.prompt_lens, self.shared_prefix = prompt_lens, shared_prefix
        self.max_new_tokens, self.poll_every, self.cached, self.narrow = max_new_tokens, poll_every, cached, narrow
        self.stateful = stateful
        self.prefill_tokens = [0 if shared else n for n, shared in zip(prompt_lens, shared_prefix, strict=True)]
        self.next_seq = 0   # sequences from here on wait
        self.last_slot = 0  # the slot of the sequence that was admitted last
        edges = [i * num_slots // num_groups for i in range(num_groups + 1)]
        self.groups = [MicroBatchGroup(a, b - a) for a, b in pairwise(edges)]
        longest = max(prompt_lens, default=0)
        self.num_slots = num_slots
        self.kv_width = max(longest, min(round_to_bucket(longest, MIN_CACHE_WIDTH, 4), max_prompt_len)) + max_new_tokens

    @property
    def has_work(self) -> bool:
        return self.next_seq < len(self.prompt_lens) or any(group.seq_ids for group in self.groups)

    def schedule(self, group: MicroBatchGroup) -> PrefillBatch | DecodeBatch | None:
        """What the group runs next; None if it has no sequences."""
        free = group.free_slots() if self.next_seq < len(self.prompt_lens) else []
        if self.cached:
            attached = tuple(zip(free, range(self.next_seq, len(self.prompt_lens)), strict=False))  # as many as fit
            self.next_seq += len(attached)
            group.seq_ids.update(attached)
            group.num_generated.update((slot, 0) for slot, _ in attached)
            return self._decode(group, attached) if group.seq_ids else None
        if self.stateful and free:
            self.prefill_tokens[self.next_seq] = self.prompt_lens[self.next_seq]
        count = num_to_admit(self.prefill_tokens, self.next_seq, len(free), group.size)
        if count:
            return self._prefill(group, free[:count])
        return self._decode(group) if group.seq_ids else None

    def retire(self, group: MicroBatchGroup, finished: Sequence[bool]) -> list[int]:
        """Free the slots whose sequences have finished, and return them. finished: for each slot of the group."""
        slots = [s for s in group.seq_ids if finished[s - group.start]]
        for s in slots:
            del group.seq_ids[s], group.num_generated[s]
        # a sequence of the maximum length finishes for certain: the host polls at that step at the latest
        steps_to_max_length = self.max_new_tokens - max(group.num_generated.values(), default=0)
        group.steps_until_poll = max(1, min(self.poll_every, steps_to_max_length))
        return slots

    def _prefill(self, group: MicroBatchGroup, slots: list[int]) -> PrefillBatch:
        first = self.next_seq
        admitted = range(first, first + len(slots))
        new = tuple(i for i in admitted if not self.shared_prefix[i] or self.stateful and i == first)
        num_shared = (new[0] if new else admitted.stop) - first
        batch = PrefillBatch(tuple(slots), first, num_shared, self.last_slot, new)
        group.seq_ids.update(zip(slots, admitted, strict=True))
        group.num_generated.update(dict.fromkeys(slots, 1))
        self.next_seq, self.last_slot = admitted.stop, slots[-1]
        return batch

    def _decode(self, group: MicroBatchGroup, attached: tuple[tuple[int, int], ...] = ()) -> DecodeBatch:
        drained = self.next_seq == len(self.prompt_lens)  # only then are freed slots not filled again
        batch_size = min(round_to_bucket(len(group.seq_ids)), group.size) if drained else group.size
        moves = self._compact(group, group.start + batch_size)
        kv_len = max(self.prompt_lens[i] + group.num_generated[s] for s, i in group.seq_ids.items())
        width = min(tokens_to_read(kv_len, self.narrow), self.kv_width)
        self.advance(group, 1)
        group.steps_until_poll -= 1
        steps_to_max_length = self.max_new_tokens - max(group.num_generated.values())
        repeats = min(width - kv_len, steps_to_max_length) if self.poll_every == 1 else 0
        return DecodeBatch(batch_size, width, moves, group.steps_until_poll <= 0, attached, repeats)

    def advance(self, group: MicroBatchGroup, steps: int) -> None:
        """Each sequence of the group has got `steps` tokens, or gets them next."""
        for s in group.num_generated:
            group.num_generated[s] += steps

    def _compact(self, group: MicroBatchGroup, end: int) -> tuple[tuple[int, int], ...]:
        """Move the sequences in slots from `end` on to free slots before it."""
        free = (s for s in group.free_slots() if s < end)
        moves = tuple((s, next(free)) for s in sorted(s for s in group.seq_ids if s >= end))
        for s, to in moves:
            group.seq_ids[to], group.num_generated[to] = group.seq_ids.pop(s), group.num_generated.pop(s)
        return moves


def num_to_admit(prefill_tokens: Sequence[int], next_seq: int, free: int, slots: int) -> int:
    """How many sequences to admit now. A prefill of a few is as slow as a decode step, so it waits until a sixteenth of
    the slots is free, or until it has enough tokens. prefill_tokens: [N] to run for each sequence; slots: of the
    group."""
    totals = list(accumulate(prefill_tokens[next_seq : next_seq + free]))
    count = max(1, sum(x <= MAX_PREFILL_TOKENS for x in totals)) if totals else 0
    is_last = next_seq + count == len(prefill_tokens)
    enough = 16 * free >= slots or is_last or (bool(totals) and totals[-1] >= MAX_PREFILL_TOKENS)
    return count if enough else 0
