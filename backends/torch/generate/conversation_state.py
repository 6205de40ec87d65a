"""The conversations of one call on one rank, whatever engine samples in them: which are alive, and what was said.

In: rows; what environments say (`Arrival`), and what a model has sampled. Out: what both said, row by row.
An agent may leave what it has said, and continue it later: then its conversation has several branches, each a
separate sequence; one of them is under way.
Invariant: nothing here depends on when environments answer, but which conversation runs when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rldsl.backends.torch.generate.kv_cache import HostSlot
from rldsl.diag import fail, internal_error
from rldsl.plan.payloads import Conversation
from rldsl.plan.turns import STOPPED
from rldsl.runtime.backend import ConversationOutput, PackedBatch, Talk
from rldsl.runtime.environments import Arrival, Stopped
from rldsl.runtime.image_tokens import beginning


@dataclass
class Branch:
    """One sequence of a conversation. Only that of an agent may have several."""

    tokens: list[int] = field(default_factory=list)  # all that was said
    own: list[bool] = field(default_factory=list)  # which of them the model said in it
    logprobs: list[float] = field(default_factory=list)  # of the model's tokens
    # of each image: how many tokens there are up to its end, and what it adds to positions after it
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
        """What the images in the cache add to the positions of the tokens after them."""
        return sum(added for end, added in self.branch.images if end <= self.cached)

    @property
    def turn(self) -> list[int]:
        """The tokens of the turn under way."""
        return self.branch.tokens[len(self.branch.tokens) - self.in_turn :]

    def append(self, ids: Sequence[int], own: bool) -> None:
        self.branch.tokens += ids
        self.branch.own += [own] * len(ids)
        self.ready = [*self.branch.tokens[self.cached :]]


@dataclass
class LiveConversations:
    """Those of one call on one rank."""

    limits: Conversation  # of a conversation
    talk: Talk | None  # the environments, on the rank that talks with them
    expected: list[Slot] = field(default_factory=list)  # conversations that have not begun, the next one last
    slots: dict[int, Slot] = field(default_factory=dict)  # row -> its conversation, until it ends
    done: list[Slot] = field(default_factory=list)  # conversations that have ended
    rewards: dict[int, float] = field(default_factory=dict)  # row -> what its environment gave in the end

    def expect(self, rows: Sequence[int]) -> None:
        """The conversations of the call."""
        self.expected = [Slot(-1, row, i) for i, row in reversed(list(enumerate(rows)))]

    @property
    def has_work(self) -> bool:
        """Whether a conversation has not ended."""
        return bool(self.expected or self.slots)

    @property
    def waits(self) -> bool:
        """Whether a conversation waits for its environment."""
        return any(slot.waits for slot in self.slots.values())

    def begin(self, most: int, number: int) -> None:
        """Begin conversations until `most` are alive. number: of the pass that comes next."""
        while self.expected and len(self.slots) < most:
            slot = self.expected.pop()
            slot.since, slot.begun = number, time.monotonic()
            slot.asked = slot.begun
            self.slots[slot.row] = slot
            if self.talk is not None:
                self.talk.begin(slot.row)

    def begin_turn(self, slot: Slot) -> None:
        """What is sampled next belongs to a new turn, if the last token is not the model's."""
        if not slot.branch.own[-1]:
            slot.branch.turns, slot.in_turn = slot.branch.turns + 1, 0

    def end_turn(self, slot: Slot) -> None:
        """Its environment has been asked."""
        slot.ready = []
        slot.asked = time.monotonic()
        slot.branch.turn_sizes.append(slot.in_turn)

    def leave_cache(self, slot: Slot) -> None:
        """Nothing of a conversation is needed in a KV cache any more."""

    def images_of(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """`Branch.images` of a first context."""
        return []

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
            self.leave_cache(slot)
            return
        if not first and slot.turns < self.limits.max_turns and has + len(arrival.tokens) < most:
            slot.append(arrival.tokens, own=False)
        if has == 0:
            slot.branch.images = self.images_of(slot.branch.tokens)
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
        self.leave_cache(slot)
        slot.at, slot.cached, slot.offloaded = number, 0, ()

    def output(self, device: torch.device) -> ConversationOutput:
        """All branches that have tokens, by conversation and in the order in which they began."""
        slots, most = sorted(self.done, key=lambda s: s.seq), self.limits.max_turns
        found = [(s, i, b) for s in slots for i, b in enumerate(s.branches)]
        rows = torch.tensor([s.row * self.limits.branches + i for s, i, _ in found], dtype=torch.int64, device=device)
        counts = torch.tensor([len(b.tokens) for *_, b in found], dtype=torch.int64, device=device)
        responses = torch.tensor([len(b.logprobs) for *_, b in found], dtype=torch.int64, device=device)
        batch = PackedBatch(rows, counts - responses, responses,
                            torch.tensor([t for *_, b in found for t in b.tokens], dtype=torch.int64, device=device),
                            torch.tensor([x for *_, b in found for x in b.own], dtype=torch.bool, device=device))
        return ConversationOutput(
            batch, torch.tensor([x for *_, b in found for x in b.logprobs], dtype=torch.float32, device=device),
            torch.tensor([self.rewards[s.row] for s, *_ in found], dtype=torch.float32, device=device),
            torch.tensor([b.turns for *_, b in found], dtype=torch.int64, device=device),
            torch.tensor([b.turn_sizes + [0] * (most - b.turns) for *_, b in found], dtype=torch.int64, device=device),
            torch.tensor([[b.turn_rewards.get(i, 0.0) for i in range(most)] for *_, b in found], dtype=torch.float32,
                         device=device),
            torch.tensor([STOPPED[s.stopped or "done"] for s, *_ in found], dtype=torch.int64, device=device),
            waited=sum(s.waited for s in slots), lasted=sum(s.lasted for s in slots),
            given_away=sum(s.given_away for s in slots))
