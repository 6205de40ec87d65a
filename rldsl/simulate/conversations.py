"""How long the conversations of a shard take: decoding continues while some of them wait for their environments.

In: how many conversations and slots, turns and latencies as distributions, and what passes cost. Out: seconds, and how
many of them the shard computes. It follows `backends/torch/generate/conversations.py`: a slot waits while its
environment works, and with `waiting="offload"` or `"recompute"` another conversation may have it meanwhile.

Conversation i of N has the turns at the quantile (i + 1/2) / N, latencies are those at the multiples of the golden
ratio, modulo 1, and lengths of turns those at the multiples of the square root of 2: all are spread evenly, and the
same in every simulation.

Starting the process of an environment and making the tokens of its answers takes the rank's own time. What the process
computes takes time of the cores that ranks leave free, one answer after the other, or else of the rank's own core.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf

from rldsl.clusters.model import Distribution
from rldsl.memory.decode_shapes import MAX_PREFILL_TOKENS
from rldsl.plan.payloads import Waiting

GOLDEN, SILVER = 0.6180339887498949, 0.41421356237309515  # (sqrt(5) - 1) / 2, sqrt(2) - 1
MOST_TURNS = 20_000  # that are followed one by one; of more, several equal conversations count as one


@dataclass(frozen=True, slots=True)
class EnvironmentCosts:
    """What environments take of the host besides `tool_seconds` and `reset_seconds`, in seconds."""

    start: float = 0.0  # of the rank, to start the process of a conversation
    turn: float = 0.0  # of the rank, per answer
    process: float = 0.0  # of a core, per conversation
    answer: float = 0.0  # of a core, per answer
    # cores that the ranks of a machine leave to the environments of each of them; 0: these share the rank's own core;
    # inf: there are always enough
    cores: float = inf

    def times(self, group: int) -> EnvironmentCosts:
        """Of `group` conversations that count as one."""
        return replace(self, start=self.start * group, turn=self.turn * group, process=self.process * group,
                       answer=self.answer * group)


@dataclass(frozen=True, slots=True)
class ShardConversations:
    """The conversations of a shard."""

    count: int  # how many there are
    slots: int  # of the KV cache
    live: int  # most that are alive at once
    waiting: Waiting  # what a slot does while its environment works
    most_turns: int  # of a conversation
    context_tokens: float  # of the environment in a whole conversation, on average
    own_tokens: float  # of the model in a whole conversation, on average
    turns: Distribution | None  # None: the most
    tool_seconds: Distribution | None  # None: an answer takes no time
    reset_seconds: Distribution | None = None  # None: the first words of a conversation take no time
    turn_tokens: Distribution | None = None  # of the model; None: all turns are equally long
    most_own: float = inf  # tokens of the model in a turn
    environments: EnvironmentCosts = EnvironmentCosts()  # of the host


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What the shard computes, in seconds."""

    decode: Callable[[float], float]  # (conversations) -> a token for each of them
    prefill: Callable[[float, float], float]  # (tokens, conversations that they belong to) -> one pass
    moved: Callable[[float], float]  # (tokens) -> their keys and values to host memory or back


@dataclass(slots=True)
class _Conversation:
    turns: int  # that it has left
    turns_done: int = 0
    placed: bool = False  # whether it has a slot
    dropped: bool = False  # whether its keys and values are not in the cache


def conversation_seconds(shard: ShardConversations, costs: PassCosts) -> tuple[float, float]:
    """(seconds until all have ended, seconds of them in which the shard computes)"""
    usual = shard.most_turns if shard.turns is None else min(shard.turns.mean, shard.most_turns)
    group = min(ceil(shard.count * usual / MOST_TURNS), max(shard.slots, 1))
    if group > 1:
        fewer = replace(shard, count=ceil(shard.count / group), slots=shard.slots // group, live=shard.live // group,
                        environments=shard.environments.times(group))
        return _one_by_one(fewer, PassCosts(lambda active: costs.decode(active * group),
                                            lambda tokens, of: costs.prefill(tokens * group, of * group),
                                            lambda tokens: costs.moved(tokens) * group))
    return _one_by_one(shard, costs)


def _one_by_one(shard: ShardConversations, costs: PassCosts) -> tuple[float, float]:
    """As `conversation_seconds`, of conversations that are followed one by one."""
    return _Followed(shard, costs).run()


class _Followed:
    """Conversations that are followed one by one, from event to event: a prefill, the end of a turn, an answer."""

    def __init__(self, shard: ShardConversations, costs: PassCosts):
        self.shard, self.costs, self.environments = shard, costs, shard.environments
        turns = [_turns(shard, (i + 0.5) / shard.count) for i in range(shard.count)]
        mean = sum(turns) / max(len(turns), 1)
        self.own_tokens = shard.own_tokens / mean if mean else 0.0  # of a turn
        self.context_tokens = shard.context_tokens / mean if mean else 0.0  # of a turn
        self.one_decodes = costs.decode(1.0)  # seconds of a decoding pass with one conversation
        self.another_decodes = (costs.decode(float(shard.slots)) - self.one_decodes) / (shard.slots - 1) \
            if shard.slots > 1 else 0.0  # additional seconds for each other one
        self.now = self.computed = 0.0
        self.progress = 0.0  # tokens that a conversation that always decodes has got
        self.expected = deque(_Conversation(n) for n in turns)  # not begun yet
        self.alive = 0  # begun and not ended
        self.free = shard.slots  # slots without a conversation
        self.ready: deque[_Conversation] = deque()  # answered, without a slot
        self.decoding: list[tuple[float, int, _Conversation]] = []  # heap, by the progress at which the turn ends
        # heap, by the time at which the environment answers, and then by that at which its process has computed that
        self.tools: list[tuple[float, int, _Conversation, bool]] = []
        own = self.environments.cores  # heap, by the time at which each core that ranks leave free can compute more
        self.cores = [0.0] * (max(int(min(own, shard.count)), 1) if 0 < own < inf else 0)
        self.core_speed = min(own, 1.0)  # of each of them
        self.waiting: dict[int, _Conversation] = {}  # for an environment, with a slot; the longest first
        self.number = 0  # of turns and answers so far: breaks ties

    def run(self) -> tuple[float, float]:
        """(seconds until all have ended, seconds of them in which the shard computes)"""
        while self.expected or self.alive:
            self.begin_conversations()
            if self.prefill() and self.ready and self.free:
                continue
            self.decode_until_next_change()
        return self.now, min(self.computed, self.now)

    def begin_conversations(self) -> None:
        """The most that may be alive: the environment says the first words of each."""
        while self.expected and self.alive < self.shard.live:
            self.alive += 1
            self.work(self.environments.start)
            self.ask_environment(self.expected.popleft(), self.shard.reset_seconds)

    def work(self, seconds: float) -> None:
        """The rank computes, and does nothing else of this shard meanwhile."""
        self.now, self.computed = self.now + seconds, self.computed + seconds

    def work_of_process(self, seconds: float, since: float) -> float:
        """The process of an environment computes, from a time on. Returns when it has."""
        if not self.cores:
            if not self.environments.cores:  # on the rank's own core, once the rank looks
                self.work(seconds)
            return since
        done = max(heapq.heappop(self.cores), since) + seconds / self.core_speed
        heapq.heappush(self.cores, done)
        return done

    def ask_environment(self, c: _Conversation, seconds: Distribution | None) -> None:
        """From now on a conversation waits for its environment. seconds: of what it asks for; None: it takes none."""
        self.number += 1
        latency = 0.0 if seconds is None else seconds.quantile((self.number * GOLDEN) % 1 or 0.5)
        heapq.heappush(self.tools, (self.now + latency, self.number, c, False))
        if c.placed:
            self.waiting[id(c)] = c

    def take_answers(self, then: float) -> None:
        """Take over what environments have answered by `then`, and while the rank does so."""
        while self.tools and self.tools[0][0] <= max(then, self.now):
            when, number, c, computed = heapq.heappop(self.tools)
            if not computed and (done := self.work_of_process(self.environments.answer, when)) > when:
                heapq.heappush(self.tools, (done, number, c, True))
                continue
            self.work(self.environments.turn)
            self.waiting.pop(id(c), None)
            if c.turns:
                self.free += c.placed  # taken again at once, unless another one has waited for longer
                c.placed = False
                self.ready.appendleft(c) if not c.dropped and c.turns_done else self.ready.append(c)
            else:
                self.free, self.alive = self.free + c.placed, self.alive - 1
                self.work_of_process(self.environments.process, self.now)

    def prefill(self) -> bool:
        """Prefill all that have been answered since the pass before and get a slot, in one pass. False: there are
        none."""
        tokens, placed, moved = 0.0, 0, 0.0
        while self.ready and tokens < MAX_PREFILL_TOKENS and (
                self.free or self.shard.waiting != "keep" and self.waiting):
            c = self.ready.popleft()
            moved += self.take_slot()
            moved += self.restore(c)
            tokens = tokens + self.context_tokens + self.forgotten(c)
            placed, c.placed, c.dropped = placed + 1, True, False
            self.number += 1
            heapq.heappush(self.decoding, (self.progress + self.tokens_of_turn(), self.number, c))
        if not placed:
            return False
        spent = self.costs.prefill(tokens, placed) + moved
        self.now, self.computed = self.now + spent, self.computed + spent
        self.take_answers(self.now)
        return True

    def tokens_of_turn(self) -> float:
        """Tokens of the model in the turn that begins."""
        if self.shard.turn_tokens is None:
            return self.own_tokens
        wanted = round(self.shard.turn_tokens.quantile((self.number * SILVER) % 1 or 0.5))
        return float(min(max(wanted, 1), self.shard.most_own))

    def take_slot(self) -> float:
        """Take a free slot, or that of the conversation that has waited for longest. Returns seconds of moving what it
        holds."""
        if self.free:
            self.free -= 1
            return 0.0
        other = self.waiting.pop(next(iter(self.waiting)))
        other.placed, other.dropped = False, True
        return self.costs.moved(self.cached_tokens(other)) if self.shard.waiting == "offload" else 0.0

    def cached_tokens(self, c: _Conversation) -> float:
        """Tokens of the turns of a conversation so far."""
        return c.turns_done * (self.own_tokens + self.context_tokens)

    def restore(self, c: _Conversation) -> float:
        """Seconds of moving back what the slot of a conversation held."""
        return self.costs.moved(self.cached_tokens(c)) if c.dropped and self.shard.waiting == "offload" else 0.0

    def forgotten(self, c: _Conversation) -> float:
        """Tokens of a conversation that are prefilled again."""
        return self.cached_tokens(c) if c.dropped and self.shard.waiting == "recompute" else 0.0

    def decode_until_next_change(self) -> None:
        """Decode until a turn ends or an environment answers, whichever comes first; only wait if none decodes."""
        a_pass = self.one_decodes + self.another_decodes * (len(self.decoding) - 1)
        ends = self.now + (self.decoding[0][0] - self.progress) * a_pass if self.decoding else inf
        arrives = self.tools[0][0] if self.tools else inf
        then = max(min(ends, arrives), self.now)
        if self.decoding:
            self.progress = self.progress + (then - self.now) / a_pass if a_pass else self.decoding[0][0]
            self.computed = self.computed + then - self.now
        self.now = then
        if ends > arrives:
            self.take_answers(self.now + a_pass if self.decoding else self.now)  # they count from the next pass on
            return
        self.progress, _, c = heapq.heappop(self.decoding)
        c.turns_done, c.turns = c.turns_done + 1, c.turns - 1
        self.ask_environment(c, self.shard.tool_seconds)


def _turns(shard: ShardConversations, u: float) -> int:
    wanted = shard.most_turns if shard.turns is None else round(shard.turns.quantile(u))
    return min(max(wanted, 1), shard.most_turns)
