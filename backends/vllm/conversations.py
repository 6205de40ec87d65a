"""Conversations with environments whose turns vLLM samples: each turn is a request with all that was said before.

In: rows, and the environments that answer. Out: what both said, row by row.
While a conversation waits, it is in no request. vLLM finds what it has computed of earlier turns among the blocks of
its KV cache, and computes again what had to make room. With `waiting="keep"` no more conversations are alive than the
cache has room for.
Invariant: what is sampled in a turn depends on (seed, step, conversation, its own tokens before) and the weights, not
on when environments answer, except for the rounding of another number of sequences in a decode step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rldsl.backends.torch.generate.conversation_state import LiveConversations, Slot
from rldsl.backends.vllm.answers import Response, responses
from rldsl.backends.vllm.process import EngineProcess
from rldsl.diag import internal_error
from rldsl.memory.decode_shapes import live_conversations
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Waiting
from rldsl.sharding.partition import mix


@dataclass(kw_only=True)
class Turns(LiveConversations):
    """One call on one rank."""

    engine: EngineProcess
    sampling: Sampling  # of one turn
    eos_ids: Sequence[int]  # that end a turn
    num_slots: int  # turns that are decoded at a time
    waiting: Waiting  # whether one that waits counts among them
    seed: int
    step: int

    def run_to_the_end(self) -> None:
        """Until every conversation has ended. Errors: RL0801 of the engine, and those of environments."""
        if self.talk is None:
            raise internal_error("conversations without environments", "generate")
        options = {**asdict(self.sampling), "eos_ids": list(self.eos_ids)}
        self.engine.ask("converse", sampling=options)
        number = 0  # of the times that the engine was asked
        while self.has_work:
            self.begin(live_conversations(self.num_slots, self.waiting), number)
            if self.waits:
                idle = all(slot.waits for slot in self.slots.values())
                for arrival in self.talk.arrivals(wait=idle):
                    self.arrived(arrival, number)
            begun = self._take()
            if any(slot.running for slot in self.slots.values()):
                # while one waits, its answer may come after any token
                _, found = self.engine.ask("turns", self._requests(begun), sampling=options, once=self.waits)
                running = {slot.row: slot for slot in self.slots.values() if slot.running}
                for row, response in responses(self.engine, "turns", found,
                                               {row: self._most(slot) for row, slot in running.items()}).items():
                    self._record(running[row], response, number)
            number += 1

    def _take(self) -> list[Slot]:
        """Conversations whose turn begins: those that are ready for longest, as many as there is room for."""
        free = self.num_slots - sum(slot.running for slot in self.slots.values())
        ready = sorted((s for s in self.slots.values() if s.ready and not s.running), key=lambda s: (s.since, s.seq))
        for slot in ready[:free]:
            slot.running = True
            self.begin_turn(slot)
        return ready[:free]

    def _most(self, slot: Slot) -> int:
        """Tokens that the turn under way may have."""
        return min(self.sampling.max_new_tokens, self.limits.max_tokens - len(slot.branch.tokens))

    def _requests(self, slots: Sequence[Slot]) -> dict[str, array[int]]:
        columns = {
            "rows": [s.row for s in slots], "tokens": [t for s in slots for t in s.branch.tokens],
            "lens": [len(s.branch.tokens) for s in slots], "most": [self._most(s) for s in slots],
            # of the turn: the position of its first token among the conversation's own ones
            "seeds": [mix(self.seed, self.step, s.row, s.num_sampled) >> 1 for s in slots]}
        return {name: array("q", numbers) for name, numbers in columns.items()}

    def _record(self, slot: Slot, response: Response, number: int) -> None:
        """A turn has ended."""
        slot.running, slot.since = False, number
        slot.branch.logprobs += response.logprobs
        slot.in_turn = len(response.tokens)
        slot.append(response.tokens, own=True)
        self.end_turn(slot)
        if self.talk is not None:
            self.talk.said(slot.row, response.tokens, not response.finished, response.logprobs)
