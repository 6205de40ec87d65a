"""How long the conversations of a shard take: decoding continues while some of them wait for their environments.

In: how many conversations and slots, turns and latencies as distributions, and what passes cost. Out: seconds, and how
many of them the shard computes. It follows `backends/torch/generate/conversations.py`: a slot waits while its
environment works, and with `waiting="offload"` or `"recompute"` another conversation may have it meanwhile.

Conversation i of N has the turns at the quantile (i + 1/2) / N, and latencies are those at the multiples of the golden
ratio, modulo 1: both are spread evenly, and the same in every simulation.
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

GOLDEN = 0.6180339887498949  # (sqrt(5) - 1) / 2
MOST_TURNS = 20_000  # that are followed one by one; of more, several equal conversations count as one


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
        fewer = replace(shard, count=ceil(shard.count / group), slots=shard.slots // group, live=shard.live // group)
        return _one_by_one(fewer, PassCosts(lambda active: costs.decode(active * group),
                                            lambda tokens, of: costs.prefill(tokens * group, of * group),
                                            lambda tokens: costs.moved(tokens) * group))
    return _one_by_one(shard, costs)


def _one_by_one(shard: ShardConversations, costs: PassCosts) -> tuple[float, float]:
    """As `conversation_seconds`, of conversations that are followed one by one."""
    turns = [_turns(shard, (i + 0.5) / shard.count) for i in range(shard.count)]
    mean = sum(turns) / max(len(turns), 1)
    each, context = shard.own_tokens / mean if mean else 0.0, shard.context_tokens / mean if mean else 0.0
    single = costs.decode(1.0)
    per_slot = (costs.decode(float(shard.slots)) - single) / (shard.slots - 1) if shard.slots > 1 else 0.0
    expected = deque(_Conversation(n) for n in turns)
    now = progress = computed = 0.0  # progress: tokens that a conversation that always decodes has got
    decoding: list[tuple[float, int, _Conversation]] = []  # by the progress at which its turn ends
    tools: list[tuple[float, int, _Conversation]] = []  # by the time at which its environment answers
    ready: deque[_Conversation] = deque()  # answered, without a slot
    away: dict[int, _Conversation] = {}  # those that wait and have a slot, the longest first
    free, alive, number = shard.slots, 0, 0

    def send_to_environment(c: _Conversation) -> None:
        nonlocal number
        number += 1
        latency = 0.0 if shard.tool_seconds is None else shard.tool_seconds.quantile((number * GOLDEN) % 1 or 0.5)
        heapq.heappush(tools, (now + latency, number, c))
        if c.placed:
            away[id(c)] = c

    def answers_until(then: float) -> None:
        """Take over what environments have answered by `then`."""
        nonlocal free, alive
        while tools and tools[0][0] <= then:
            _, _, c = heapq.heappop(tools)
            away.pop(id(c), None)
            if c.turns:
                free += c.placed  # taken again at once, unless another one has waited for longer
                c.placed = False
                ready.appendleft(c) if not c.dropped and c.turns_done else ready.append(c)
            else:
                free, alive = free + c.placed, alive - 1

    while expected or alive:
        while expected and alive < shard.live:
            alive += 1
            send_to_environment(expected.popleft())
        tokens, placed, moved = 0.0, 0, 0.0
        while ready and tokens < MAX_PREFILL_TOKENS and (free or shard.waiting != "keep" and away):
            c = ready.popleft()
            if free:
                free -= 1
            else:
                other = away.pop(next(iter(away)))
                other.placed, other.dropped = False, True
                if shard.waiting == "offload":
                    moved += costs.moved(other.turns_done * (each + context))
            c.placed = True
            before = c.turns_done * (each + context)
            again = before if c.dropped and shard.waiting == "recompute" else 0.0
            moved += costs.moved(before) if c.dropped and shard.waiting == "offload" else 0.0
            tokens, placed, c.dropped = tokens + context + again, placed + 1, False
            number += 1
            heapq.heappush(decoding, (progress + each, number, c))
        if placed:  # all that have been answered since the pass before, in one pass
            spent = costs.prefill(tokens, placed) + moved
            now, computed = now + spent, computed + spent
            answers_until(now)
            if ready and free:
                continue
        a_pass = single + per_slot * (len(decoding) - 1)
        ends = now + (decoding[0][0] - progress) * a_pass if decoding else inf
        arrives = tools[0][0] if tools else inf
        then = max(min(ends, arrives), now)
        if decoding:
            progress, computed = progress + (then - now) / a_pass if a_pass else decoding[0][0], computed + then - now
        now = then
        if ends <= arrives:
            progress, _, c = heapq.heappop(decoding)
            c.turns_done, c.turns = c.turns_done + 1, c.turns - 1
            send_to_environment(c)
            continue
        answers_until(now + a_pass if decoding else now)  # answers count from the next pass on
    return now, min(computed, now)


def _turns(shard: ShardConversations, u: float) -> int:
    wanted = shard.most_turns if shard.turns is None else round(shard.turns.quantile(u))
    return min(max(wanted, 1), shard.most_turns)
