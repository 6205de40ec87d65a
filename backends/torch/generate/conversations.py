"""Conversations with environments by one shard: many turns in one KV cache.

In: rows, and the environments that answer. Out: what both said, row by row, with the log-probs of the model's tokens.

While the environment of a conversation works, its slot of the KV cache waits and the others go on decoding; an answer
is prefilled behind what the slot holds. With `waiting="keep"` a conversation has its slot from its beginning to its
end. Otherwise more conversations are alive than there are slots: one gets a slot when it has tokens to run, and may
lose it while it waits. What its slot holds goes to host memory ("offload"), or all that was said is prefilled again
("recompute"). Each pass takes slots that are ready, so its shapes change from pass to pass and none is captured: that
is what this engine is slower by than that of single responses.
Every rank of the shard makes the same decisions, since all learn the same at the same pass (`conversation_ticks.py`).
An agent may leave what it has said, and continue it later: then its conversation has several branches, each a sequence
of its own. One of them is in the slot. Another one that the agent turns to is prefilled, all of it.
Invariant: what is sampled depends on (seed, step, conversation, position among its own tokens) and the model, not on
when environments answer, except for the rounding of passes of other shapes, which `invariant=true` excludes. A branch
is sampled, and its log-probs are those, under its own tokens alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from rldsl.backends.torch.generate.conversation_ticks import run_to_the_end
from rldsl.backends.torch.generate.kv_cache import HostSlot, KVCache
from rldsl.backends.torch.generate.sampling import Sampler
from rldsl.backends.torch.generate.slot_attention import SlotAttention
from rldsl.backends.torch.generate.stop_conditions import StopStrings, tokenizer_of
from rldsl.backends.torch.model.stage import Stage
from rldsl.diag import fail, internal_error
from rldsl.memory.decode_shapes import MAX_PREFILL_TOKENS, live_conversations
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.plan.turns import STOPPED
from rldsl.runtime.backend import Axes, ConversationOutput, PackedBatch, Talk
from rldsl.runtime.draws import uniform
from rldsl.runtime.environments import Arrival, Stopped
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.image_tokens import beginning

PASSES_TO_WAIT = 8  # that a conversation keeps its slot for while it waits, if others can decode


@dataclass
class Branch:
    """One sequence of a conversation. Only that of an agent may have several."""

    tokens: list[int] = field(default_factory=list)  # all that was said
    own: list[bool] = field(default_factory=list)  # which of them the model said in it
    logprobs: list[float] = field(default_factory=list)  # of the model's tokens
    # of each image: how many tokens there are up to its end, and what it adds to positions behind it
    images: list[tuple[int, int]] = field(default_factory=list)
    turns: int = 0  # of the model, begun
    turn_sizes: list[int] = field(default_factory=list)  # tokens of each turn that has ended
    turn_rewards: dict[int, float] = field(default_factory=dict)  # turn, from 0 -> what the environment gave for it


@dataclass
class Slot:
    """A conversation and its place in the KV cache, which is that of the branch that is under way."""

    index: int  # in the cache; -1: it has none
    row: int  # its number
    seq: int  # of the call: the order in which conversations begin
    cached: int = 0  # tokens whose keys and values are in the cache, or will be after the pass under way
    ready: list[int] = field(default_factory=list)  # tokens to run next, the last of which predicts; none: it waits
    since: int = 0  # the pass from which on they are ready, or it waits
    offloaded: HostSlot = ()  # what was in its slot of the cache, if it has none
    running: bool = False  # whether it is in a pass whose outcome is not known yet
    branches: list[Branch] = field(default_factory=lambda: [Branch()])
    at: int = 0  # the branch that is under way
    in_turn: int = 0  # tokens of the turn under way
    stopped: Stopped | None = None  # why it ended
    begun: float = 0.0  # when it began, of a clock in seconds
    asked: float = 0.0  # when its environment was asked last
    waited: float = 0.0  # seconds that it has waited for its environment
    lasted: float = 0.0  # seconds from its beginning to its end
    given_away: int = 0  # how often it gave its slot away

    @property
    def waits(self) -> bool:
        """Whether its environment has been asked, and has not answered."""
        return not self.ready and not self.running

    @property
    def branch(self) -> Branch:
        """What is under way."""
        return self.branches[self.at]

    @property
    def turns(self) -> int:
        """Turns of the model, of all branches, begun."""
        return sum(b.turns for b in self.branches)

    @property
    def num_sampled(self) -> int:
        """Tokens of the model, of all branches."""
        return sum(len(b.logprobs) for b in self.branches)

    @property
    def shift(self) -> int:
        """What the images in the cache add to the positions of the tokens behind them."""
        return sum(added for end, added in self.branch.images if end <= self.cached)

    @property
    def turn(self) -> list[int]:
        """The tokens of the turn under way."""
        return self.branch.tokens[len(self.branch.tokens) - self.in_turn :]

    def append(self, ids: Sequence[int], own: bool) -> None:
        self.branch.tokens += ids
        self.branch.own += [own] * len(ids)
        self.ready = [*self.branch.tokens[self.cached :]]


@torch.no_grad()
def converse(stage: Stage, axes: Axes, rows: torch.Tensor, sampling: Sampling, limits: Conversation,
             talk: Talk | None, *, tokenizer_dir: str, seed: int, step: int, max_num_seqs: int,
             waiting: Waiting = "keep") -> ConversationOutput:
    """See `Shard.converse`."""
    tokenizer, eos_ids = tokenizer_of(tokenizer_dir)
    device, numbers = stage.device, rows.tolist()
    sampler = Sampler(stage, sampling, seed, step, torch.tensor(eos_ids, device=device)) if stage.last else None
    engine = Engine(stage, sampler, StopStrings(sampling.stop, tokenizer) if sampling.stop else None, sampling, limits,
                    talk, frozenset(eos_ids), KVCache(min(max_num_seqs or len(numbers), len(numbers)),
                                                      limits.max_tokens, device), axes.pp.size, waiting)
    engine.expect(numbers)
    run_to_the_end(engine, axes)
    return _output(engine, limits, device)


def _output(engine: Engine, limits: Conversation, device: torch.device) -> ConversationOutput:
    """All branches that have tokens, by conversation and in the order in which they began."""
    slots, most = sorted(engine.done, key=lambda s: s.seq), limits.max_turns
    found = [(s, i, b) for s in slots for i, b in enumerate(s.branches)]
    rows = torch.tensor([s.row * limits.branches + i for s, i, _ in found], dtype=torch.int64, device=device)
    counts = torch.tensor([len(b.tokens) for *_, b in found], dtype=torch.int64, device=device)
    responses = torch.tensor([len(b.logprobs) for *_, b in found], dtype=torch.int64, device=device)
    batch = PackedBatch(rows, counts - responses, responses,
                        torch.tensor([t for *_, b in found for t in b.tokens], dtype=torch.int64, device=device),
                        torch.tensor([x for *_, b in found for x in b.own], dtype=torch.bool, device=device))
    return ConversationOutput(
        batch, torch.tensor([x for *_, b in found for x in b.logprobs], dtype=torch.float32, device=device),
        torch.tensor([engine.rewards[s.row] for s, *_ in found], dtype=torch.float32, device=device),
        torch.tensor([b.turns for *_, b in found], dtype=torch.int64, device=device),
        torch.tensor([b.turn_sizes + [0] * (most - b.turns) for *_, b in found], dtype=torch.int64, device=device),
        torch.tensor([[b.turn_rewards.get(i, 0.0) for i in range(most)] for *_, b in found], dtype=torch.float32,
                     device=device),
        torch.tensor([STOPPED[s.stopped or "done"] for s, *_ in found], dtype=torch.int64, device=device),
        waited=sum(s.waited for s in slots), lasted=sum(s.lasted for s in slots),
        given_away=sum(s.given_away for s in slots))


@dataclass
class Engine:
    """One call on one rank. All decisions are made on the host, which reads the sampled tokens after each pass."""

    stage: Stage  # the model's layers on this rank
    sampler: Sampler | None  # of next tokens, on the last stage
    stop_strings: StopStrings | None  # that end a turn, besides end-of-sequence tokens
    sampling: Sampling  # of one turn
    limits: Conversation  # of a conversation
    talk: Talk | None  # the environments, on the rank that talks with them
    eos_ids: frozenset[int]  # that end a turn
    cache: KVCache  # a slot for each conversation at a time
    num_stages: int  # of the pipeline: so many passes are under way
    waiting: Waiting = "keep"  # what a slot does while its environment works
    expected: list[Slot] = field(default_factory=list)  # conversations that have not begun, the next one last
    free: list[int] = field(default_factory=list)  # slots of the cache, the next one last
    slots: dict[int, Slot] = field(default_factory=dict)  # row -> its conversation, until it ends
    done: list[Slot] = field(default_factory=list)  # conversations that have ended
    rewards: dict[int, float] = field(default_factory=dict)  # row -> what its environment gave in the end

    def expect(self, rows: Sequence[int]) -> None:
        """The conversations of the call."""
        self.expected = [Slot(-1, row, i) for i, row in reversed(list(enumerate(rows)))]
        self.free = list(reversed(range(self.cache.num_slots)))

    @property
    def has_work(self) -> bool:
        """Whether a conversation has not ended."""
        return bool(self.expected or self.slots)

    @property
    def has_tokens(self) -> bool:
        """Whether a pass is under way, or could begin."""
        return not all(slot.waits for slot in self.slots.values())

    @property
    def waits(self) -> bool:
        """Whether a conversation waits for its environment."""
        return any(slot.waits for slot in self.slots.values())

    def schedule(self, number: int) -> list[Slot]:
        """Begin conversations, and take slots for a pass: those that are ready for longest, either with one token each
        or with answers to prefill. number: of the pass."""
        while self.expected and len(self.slots) < live_conversations(self.cache.num_slots, self.waiting):
            slot = self.expected.pop()
            slot.since, slot.begun = number, time.monotonic()
            slot.asked = slot.begun
            self.slots[slot.row] = slot
            if self.talk is not None:
                self.talk.begin(slot.row)
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
            if not slot.branch.own[-1]:  # a turn starts
                slot.branch.turns, slot.in_turn = slot.branch.turns + 1, 0
        return batch

    def _place(self, slot: Slot) -> None:
        """Give a free slot of the cache to a conversation, with what it had in it before."""
        slot.index = self.free.pop()
        self.cache.onload(slot.index, slot.cached, slot.offloaded)
        slot.offloaded = ()

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
        self._release(slot)
        slot.given_away += 1
        return True

    def _release(self, slot: Slot) -> None:
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
                slot.ready = []
                slot.asked = time.monotonic()
                slot.branch.turn_sizes.append(slot.in_turn)

    def arrived(self, arrival: Arrival, number: int) -> None:
        """Take over what an environment said. number: of the pass that comes next."""
        slot = self.slots.get(arrival.row)
        if slot is None or not slot.waits:
            raise internal_error(f"an environment answers in row {arrival.row}, which was not asked", "generate")
        now = time.monotonic()
        slot.since, slot.asked, slot.waited = number, now, slot.waited + now - slot.asked
        if arrival.turn_reward is not None and slot.branch.turns:
            slot.branch.turn_rewards[slot.branch.turns - 1] = arrival.turn_reward
        first = not slot.branch.tokens
        if not first and not arrival.ended:
            self._turn_to(slot, arrival.branch)
        most, has = self.limits.max_tokens, len(slot.branch.tokens)
        if first:  # the first context stays, whatever ends the conversation
            slot.append(self._begun_with(arrival), own=False)
            slot.ready = slot.ready if len(arrival.tokens) < most and not arrival.ended else []
        if arrival.ended:
            slot.stopped, slot.lasted, slot.offloaded = arrival.stopped, now - slot.begun, ()
            self.rewards[slot.row] = arrival.reward if arrival.reward is not None else sum(
                sum(b.turn_rewards.values()) for b in slot.branches)
            slot.branches = [b for b in slot.branches if b.tokens]
            self.done.append(self.slots.pop(slot.row))
            self._release(slot)
            return
        if not first and slot.turns < self.limits.max_turns and has + len(arrival.tokens) < most:
            slot.append(arrival.tokens, own=False)
        if has == 0 and self.stage.vision is not None:
            slot.branch.images = self.stage.vision.ends(slot.branch.tokens)
        if not slot.ready and self.talk is not None:
            self.talk.finish(slot.row, "max_turns" if slot.turns == self.limits.max_turns else "max_tokens")

    def _begun_with(self, arrival: Arrival) -> Sequence[int]:
        """The tokens of a first context that a conversation has room for."""
        found = beginning(arrival.tokens, self.limits.max_tokens)
        if not found and arrival.tokens:
            raise fail("RL0756", f"the conversation of row {arrival.row} begins with an image of more tokens than "
                       f"max_tokens={self.limits.max_tokens}", help="raise `max_tokens=` of `generate`")
        return found

    def _turn_to(self, slot: Slot, number: int) -> None:
        """Another branch of a conversation, or a new one, takes the place of the one that was under way."""
        if number == slot.at:
            return
        if number > len(slot.branches) or number >= self.limits.branches:
            raise internal_error(f"an agent turns to branch {number} of row {slot.row}", "generate")
        slot.branches += [Branch()] if number == len(slot.branches) else []
        self._release(slot)
        slot.at, slot.cached, slot.offloaded = number, 0, ()

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
