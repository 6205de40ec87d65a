"""The state that decoding works on: KV cache, the sequences in its slots, what has been sampled, and captured steps.

In: the number of sequences, slots and tokens. Out: a zeroed `DecodeState`. A later generate call of the same shape
takes the same state, so that it finds its steps captured; in between the state has no memory, only the list of what is
done on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch

from rldsl.backends.torch.generate.captured_step import CapturedSteps, CaptureSwitch
from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.backends.torch.generate.releasable_storage import ReleasableStorage
from rldsl.backends.torch.kernels.sampled_tokens import Appender
from rldsl.runtime.backend import Axis
from rldsl.runtime.collectives import all_agree

MAX_KEPT_STATES = 2  # states that a shard keeps: one for sampling and one for evaluation, say


@dataclass
class Responses:
    """What has been sampled so far, by sequence. M is max_new_tokens; column M takes what is dropped."""

    tokens: torch.Tensor    # [N, M + 1] int64
    logprobs: torch.Tensor  # [N, M + 1] float32
    lengths: torch.Tensor   # [N] int64, tokens sampled
    finished: torch.Tensor  # [N] bool, ended before its maximum length

    def first(self, count: int) -> Responses:
        """Those of the first sequences."""
        return Responses(*(x[:count] for x in (self.tokens, self.logprobs, self.lengths, self.finished)))

    @staticmethod
    def empty(count: int, max_new_tokens: int, device: torch.device) -> Responses:
        return Responses(torch.zeros(count, max_new_tokens + 1, dtype=torch.long, device=device),
                         torch.zeros(count, max_new_tokens + 1, device=device),
                         torch.zeros(count, dtype=torch.long, device=device),
                         torch.zeros(count, dtype=torch.bool, device=device))


class SlotState:
    """The sequence of each slot, on the device."""

    seq_id: torch.Tensor           # [slots] int64
    num_generated: torch.Tensor    # [slots] int64, tokens sampled
    sampled_before: torch.Tensor   # [slots] int64, tokens of the response that earlier calls sampled
    last_prompt_pos: torch.Tensor  # [slots] int64, position of the prompt's last token
    shift: torch.Tensor            # [slots] int64, what images add to the position of a new token
    token: torch.Tensor            # [slots] int64, sampled last
    logprob: torch.Tensor          # [slots] float32, of that token
    active: torch.Tensor           # [slots] bool, neither finished nor at its maximum length
    finished: torch.Tensor         # [slots] bool, ended by an end token or a stop string
    draws: torch.Tensor            # [slots, M + 1] float64, its random numbers; no rows if there are none

    def __init__(self, slots: int, max_new_tokens: int, device: torch.device, draws: bool):
        (self.seq_id, self.num_generated, self.sampled_before, self.last_prompt_pos, self.shift,
         self.token) = torch.zeros(6, slots, dtype=torch.long, device=device)
        self.logprob = torch.zeros(slots, device=device)
        self.active, self.finished = torch.zeros(2, slots, dtype=torch.bool, device=device)
        self.draws = torch.zeros(slots if draws else 0, max_new_tokens + 1, dtype=torch.float64, device=device)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move sequences to other slots. `logprob` stays: it is read before the next move."""
        fields = (self.seq_id, self.num_generated, self.sampled_before, self.last_prompt_pos, self.shift, self.token,
                  self.active, self.finished)
        source, target = torch.tensor([list(sources), list(targets)], dtype=torch.int64, device=self.active.device)
        for x in (*fields, self.draws) if len(self.draws) else fields:
            x[target] = x[source]
        self.active[source] = False


@dataclass
class DecodeState:
    """Everything on the device that a generate call writes."""

    cache: KVCache                            # keys and values of all slots
    slots: SlotState                          # the sequence in each slot
    responses: Responses                      # what has been sampled, by sequence
    eos_ids: torch.Tensor                     # [E] int64, tokens that end a sequence
    decode_steps: CapturedSteps               # forward pass and sampling of a decode step
    bookkeeping: CapturedSteps                # appends what a decode step has sampled to the responses
    # (first slot, batch size) of a group's decode steps -> the hidden states of the stage before, [batch size, H]
    recv_buffers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    storage: ReleasableStorage | None = None  # while no call uses the state

    @staticmethod
    def allocate(num_seqs: int, num_slots: int, kv_width: int, max_new_tokens: int, eos_ids: Sequence[int], draws: bool,
                 num_groups: int, capture: CaptureSwitch, tp: Axis, device: torch.device) -> DecodeState:
        """draws: whether random numbers are needed. capture: whether steps are captured. tp: whose ranks run decode
        steps together; each records samples on its own."""
        def agree(yes: bool) -> bool:
            return yes if tp.size == 1 else all_agree(yes, tp.group, device)
        return DecodeState(
            KVCache(num_slots, kv_width, device), SlotState(num_slots, max_new_tokens, device, draws),
            Responses.empty(num_seqs, max_new_tokens, device), torch.tensor(eos_ids, dtype=torch.long, device=device),
            CapturedSteps(device, capture.enabled, num_groups=num_groups, switch=capture, all_agree=agree),
            CapturedSteps(device, capture.enabled, repeatable=False, num_groups=num_groups, switch=capture))

    def appender(self) -> Appender:
        """Appends what decode steps on a CPU sample."""
        slots, responses = self.slots, self.responses
        return Appender(
            (slots.seq_id, slots.num_generated, slots.token, slots.logprob, slots.active, slots.finished),
            (responses.tokens, responses.logprobs, responses.lengths, responses.finished), self.eos_ids)

    def allocate_memory(self) -> None:
        """Make a released state like a new one: everything is 0, and every slot empty."""
        if self.storage is None:
            return
        self.storage.allocate_memory()
        self.storage = None
        for x in self._tensors():
            x.zero_()

    def release_memory(self) -> None:
        """Give all memory back, that of captured steps too."""
        self.decode_steps.release_memory()
        self.bookkeeping.release_memory()
        self.storage = ReleasableStorage((*self._tensors(), *self.recv_buffers.values()))
        self.storage.release_memory()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for record in (vars(self.slots), vars(self.responses)):
            yield from record.values()
        yield from self.cache.tensors()


DecodeStates = MutableMapping[Hashable, DecodeState]


def keep_released(states: DecodeStates, key: Hashable, state: DecodeState) -> None:
    """Keep a state, without memory, for the next call with this key; of too many, drop the oldest."""
    state.release_memory()
    states[key] = state
    if len(states) > MAX_KEPT_STATES:
        del states[next(iter(states))]
