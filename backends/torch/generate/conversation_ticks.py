"""Passes of conversations over the ranks of a shard, and how these learn what environments said.

In: an engine on each rank. Out: all of its conversations have ended.

As in `clock_ticks.py`, pass i is run by stage s in clock tick i + s, and what the last stage samples in it goes to all
stages, which know it when pass i + pp is scheduled. With it goes what has arrived from environments, which the first tp
rank of the last stage alone talks with: while a conversation waits, it looks for arrivals after each pass, and they
count from pass i + pp on. So what a pass consists of follows from the outcomes of the passes i - pp and before, on
every rank. A message says how large the arrivals are that follow it; nobody outside the shard gets one.

No deadlock: a message of a boundary between ticks exists for both sides, by what they know of the pass, and is posted
together with all others of the boundary; the arrivals follow once these are through. The rank that talks waits for an
environment only if no pass has tokens and no arrivals are on their way, and environments answer within a time limit
without any rank's help. Shards that share experts ask before each pass whether any of them has tokens, and all run a
pass or none; the rank that talks then never waits, since others may need its shard's experts.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist

from rldsl.backends.torch.generate.engine import dummy_pass
from rldsl.runtime.backend import Axes
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.environments import Arrival, Stopped

if TYPE_CHECKING:
    from rldsl.backends.torch.generate.conversation_state import Slot
    from rldsl.backends.torch.generate.conversations import Engine

REASONS: tuple[Stopped, ...] = get_args(Stopped)
SECONDS_BETWEEN_LOOKS = 0.002  # while nothing can be done, and experts are shared


def run_to_the_end(engine: Engine, axes: Axes) -> None:
    """Run until every conversation of this shard, and of those that share its experts, has ended."""
    passes, tick = _Passes(engine, axes), -axes.pp.index
    received: torch.Tensor | None = None
    while True:
        hidden = None
        if tick >= 0:
            now = passes.at(tick)
            any_has_work, any_has_tokens = passes.agree(now.has_work, bool(now.batch))
            if not any_has_work:
                return
            hidden = passes.run(tick, received, any_has_tokens)
        received = passes.exchange(tick, hidden) if axes.pp.size > 1 else None
        tick += 1


@dataclass
class _Pass:
    """A pass whose outcome has not been taken over."""

    batch: list[Slot]  # the slots whose tokens are run; none: an idle one
    waits: bool  # whether a conversation waited when it was scheduled, so that arrivals are looked for after it
    has_work: bool  # whether a conversation had not ended, or a message about an earlier pass was on its way
    sampled: torch.Tensor | None = None  # [2, slots] float64: tokens and their log-probs
    arrivals: list[int] = field(default_factory=list)  # that were found after it, encoded

    @property
    def has_outcome(self) -> bool:
        """Whether the last stage says something about it."""
        return bool(self.batch) or self.waits


class _Passes:
    """The passes that are under way at this stage, numbered by its ticks."""

    def __init__(self, engine: Engine, axes: Axes):
        self.engine, self.tp, self.pp, self.ep = engine, axes.tp, axes.pp, axes.ep
        self.device = engine.stage.device
        self.under_way: dict[int, _Pass] = {}

    def at(self, number: int) -> _Pass:
        """A pass; scheduled once, from the outcomes of the pass before by pp ones and of all before that."""
        if number not in self.under_way:
            before = self.under_way.pop(number - self.pp.size, None)
            if before is not None:
                if before.sampled is not None:
                    self.engine.record(before.batch, before.sampled, number)
                for arrival in decoded(before.arrivals):
                    self.engine.arrived(arrival, number)
            batch = self.engine.schedule(number)
            has_work = self.engine.has_work or any(p.has_outcome for p in self.under_way.values())
            self.under_way[number] = _Pass(batch, self.engine.waits, has_work)
        return self.under_way[number]

    def agree(self, has_work: bool, has_tokens: bool) -> tuple[bool, bool]:
        """Whether any shard that shares experts with this one has conversations, and tokens in its pass."""
        if self.ep.size == 1:
            return has_work, has_tokens
        flags = torch.tensor([has_work, has_tokens], dtype=torch.int64, device=self.device)
        all_reduce(flags, dist.ReduceOp.MAX, self.ep.group)
        any_has_work, any_has_tokens = flags.tolist()
        return bool(any_has_work), bool(any_has_tokens)

    def run(self, number: int, received: torch.Tensor | None, any_has_tokens: bool) -> torch.Tensor | None:
        """Run a pass, on the last stage sample, and look for arrivals. Returns its hidden states."""
        now, hidden = self.under_way[number], None
        if now.batch:
            hidden = self.engine.forward(now.batch, received)
        elif any_has_tokens:
            dummy_pass(self.engine.stage)
        if self.engine.stage.last:
            if hidden is not None:
                now.sampled = self.engine.sample(now.batch, hidden)
            if now.waits:
                now.arrivals = self._look(any_has_tokens)
        return hidden

    def _look(self, any_has_tokens: bool) -> list[int]:
        """What environments have said, on all tp ranks of the last stage."""
        found: list[int] = []
        if self.engine.talk is not None:
            on_their_way = any(p.arrivals for p in self.under_way.values())
            idle = not (any_has_tokens or self.engine.has_tokens or on_their_way)
            if idle and self.ep.size > 1:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            found = encoded(self.engine.talk.arrivals(wait=idle and self.ep.size == 1))
        if self.tp.size == 1:
            return found
        size = torch.tensor(len(found), device=self.device)
        dist.broadcast(size, src=self.tp.ranks[0], group=self.tp.group)
        if not int(size):
            return []
        message = torch.tensor(found or [0] * int(size), dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=self.tp.ranks[0], group=self.tp.group)
        return list(message.tolist())

    def exchange(self, tick: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Send and receive everything that travels after a tick. hidden: of this stage in it. Returns the hidden states
        of the next pass."""
        pp, stage = self.pp, self.engine.stage
        last_stage = pp.size - 1
        post = _Posts(pp.ranks, pp.group)
        if not stage.last and hidden is not None:
            post.add(dist.isend, hidden.contiguous(), pp.index + 1)
        received = None
        if not stage.first and tick >= -1 and (coming := self.at(tick + 1).batch):
            received = torch.empty(sum(len(s.ready) for s in coming), stage.hidden_size, dtype=stage.residual_dtype,
                                   device=self.device)
            post.add(dist.irecv, received, pp.index - 1)
        known = self.under_way.get(tick + pp.index - last_stage)  # what the last stage ran in this tick
        outcome = None
        if known is not None and known.has_outcome:
            outcome = torch.empty(2 * len(known.batch) + 1, dtype=torch.float64, device=self.device)
            if stage.last:
                outcome[-1] = len(known.arrivals)
                if known.sampled is not None:
                    outcome[:-1] = known.sampled.flatten()
            post.outcome(outcome, pp.index)
        post.finish()
        if known is not None and outcome is not None:
            count = int(outcome[-1])
            if not stage.last and known.batch:
                known.sampled = outcome[:-1].view(2, -1)
            if count:
                message = torch.tensor(known.arrivals or [0] * count, dtype=torch.int64, device=self.device)
                post.outcome(message, pp.index)
                post.finish()
                known.arrivals = list(message.tolist())
        return received


class _Posts:
    """Messages over the links of a pipeline that are posted together."""

    def __init__(self, ranks: Sequence[int], group: Any):
        self.ranks, self.group = ranks, group
        self.operations: list[dist.P2POp] = []

    def add(self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
        """peer: the stage at the other end."""
        self.operations.append(dist.P2POp(operation, tensor, self.ranks[peer], self.group))

    def outcome(self, tensor: torch.Tensor, stage: int) -> None:
        """From the last stage to all others. stage: this one."""
        last = len(self.ranks) - 1
        if stage == last:
            for peer in range(last):
                self.add(dist.isend, tensor, peer)
        else:
            self.add(dist.irecv, tensor, last)

    def finish(self) -> None:
        """Wait for all of them."""
        for work in dist.batch_isend_irecv(self.operations) if self.operations else ():
            work.wait()
        self.operations = []


def encoded(arrivals: Sequence[Arrival]) -> list[int]:
    """As 64-bit integers: of each arrival seven, and its tokens, which may carry numbers of images."""
    return [x for a in arrivals for x in (
        a.row, int(a.ended), -1 if a.stopped is None else REASONS.index(a.stopped), _bits(a.reward),
        _bits(a.turn_reward), a.branch, len(a.tokens), *a.tokens)]


def decoded(numbers: Sequence[int]) -> Iterator[Arrival]:
    """What `encoded` wrote."""
    at = 0
    while at < len(numbers):
        row, ended, reason, reward, turn_reward, branch, count = numbers[at : at + 7]
        tokens = tuple(numbers[at + 7 : at + 7 + count])
        yield Arrival(row, tokens, bool(ended), None if reason < 0 else REASONS[reason], _number(reward),
                      _number(turn_reward), branch)
        at += 7 + count


def _bits(number: float | None) -> int:
    """Those of a float64, as an integer; of NaN for None."""
    return int.from_bytes(struct.pack("<d", nan if number is None else number), "little", signed=True)


def _number(bits: int) -> float | None:
    """What `_bits` was given."""
    (found,) = struct.unpack("<d", bits.to_bytes(8, "little", signed=True))
    return None if isnan(found) else float(found)
