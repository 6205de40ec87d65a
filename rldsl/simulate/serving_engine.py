"""How long a serving engine (vLLM's kind) generates: continuous batching over responses of different lengths.

In: the responses of one engine, what its ranks run on. Out: seconds. A cluster file that states the memory of the
engine (`cache_gb`) says that one generates. Terms: all sequences begin together, as far as the paged KV cache has room
for them (Kwon et al. 2023, arXiv:2309.06180); where it becomes full, the sequence that began last gives up its place
and is computed again later; each decoding step reads the weights, and the cache of its own sequences only; kernels are
replayed from a captured graph, so the host costs what the cluster file states per step and per sequence; towards the
end few sequences are left, and each step still reads the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, log, sqrt
from statistics import NormalDist

from rldsl.simulate.lengths import Row

CLASSES = 64  # groups of responses of about equal length
ROUNDS = 256  # least number of parts of the whole, each with the same sequences from its begin to its end
HEADROOM = 8  # rounds in which there is room for all active sequences, where one more begins
CHUNK = 16_384  # prompt tokens in one pass


@cache
def response_lengths(row: Row, batch: int, parts: int) -> tuple[float, ...]:
    """`parts` quantiles of the lengths of a batch of responses, the shortest first: lognormal, cut at the longest, with
    the row's mean. Without a stated deviation the one with which the longest of the batch is expected to be as long
    as the row says, uncut."""
    if row.response >= row.longest or batch < 2:
        return (row.response,) * parts
    normal = NormalDist()
    sigma = row.log_std or _log_std(log(row.longest / row.response), normal.inv_cdf((batch - 0.375) / (batch + 0.25)))
    drawn = [exp(sigma * normal.inv_cdf((i + 0.5) / parts)) for i in range(parts)]
    low, high = 0.0, row.longest / drawn[0]  # of the median: nothing, or all are cut
    for _ in range(60):
        middle = (low + high) / 2
        short = sum(min(middle * x, row.longest) for x in drawn) < row.response * parts
        low, high = (middle, high) if short else (low, middle)
    return tuple(min(high * x, row.longest) for x in drawn)


def _log_std(ratio: float, extreme: float) -> float:
    """The standard deviation of the logarithm, where the longest is exp(`ratio`) times the mean and `extreme` standard
    deviations from the middle, as the largest of a batch is expected to be (Blom 1958)."""
    return extreme - sqrt(max(extreme**2 - 2 * ratio, 0.0))


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine does."""

    seconds: float  # until the last response ends
    steps: float  # decoding steps
    again: float  # tokens that are computed a second time, because the cache was full


@dataclass(slots=True)
class _Sequence:
    """A group of responses that begin and end together."""

    length: float  # tokens of the response
    weight: float  # how many responses
    done: float = 0.0  # tokens that it has


def serve(row: Row, rows: float, batch: int, capacity: float, step: Callable[[float, float], float],
          prefill: Callable[[float], float], shared: float) -> Served:
    """rows: responses of the engine, of a batch of `batch`. capacity: tokens that its KV cache holds. step: seconds of
    a decoding step of (sequences, tokens in their caches). prefill: seconds of a pass over prompt tokens. shared:
    responses that share a prompt's tokens."""
    parts = max(1, min(CLASSES, round(rows)))
    lengths = list(response_lengths(row, batch, parts))
    order = sorted(range(parts), key=lambda i: i * 0.6180339887 % 1)  # lengths do not depend on the order
    waiting = [_Sequence(lengths[i], rows / parts) for i in reversed(order)]
    if row.longest > lengths[-1] and rows > 1:  # the engine that the others wait for has the longest response
        waiting.append(_Sequence(row.longest, 1.0))
    active: list[_Sequence] = []
    longest = max(capacity, (row.prompt + row.longest) * rows / parts)  # one group always fits
    per_round = max(row.longest / ROUNDS, 1.0)
    seconds, steps, again = _passes(prefill, rows / max(shared, 1.0) * row.prompt), 0.0, 0.0
    while waiting or active:
        used = sum((row.prompt + s.done) * s.weight for s in active)
        count = sum(s.weight for s in active)
        while waiting and (not active or used + (row.prompt + waiting[-1].done) * waiting[-1].weight + HEADROOM * (
                per_round * (count + waiting[-1].weight)) <= longest):
            count += waiting[-1].weight
            active.append(waiting.pop())
            used += (row.prompt + active[-1].done) * active[-1].weight
            if active[-1].done:
                again += (row.prompt + active[-1].done) * active[-1].weight
                seconds += _passes(prefill, (row.prompt + active[-1].done) * active[-1].weight)
        now = min(per_round, min(s.length - s.done for s in active))
        now = max(now, 1e-9)
        while len(active) > 1 and used + now * sum(s.weight for s in active) > longest:
            last = active.pop()
            used -= (row.prompt + last.done) * last.weight
            waiting.append(last)
        count = sum(s.weight for s in active)
        seconds += now * step(count, used + now / 2 * count)
        steps += now
        for s in active:
            s.done += now
        active = [s for s in active if s.length - s.done > 1e-6]
    return Served(seconds, steps, again)


def _passes(prefill: Callable[[float], float], tokens: float) -> float:
    """Seconds of prefilling `tokens` tokens, in chunks."""
    if tokens <= 0:
        return 0.0
    number = ceil(tokens / CHUNK)
    return number * prefill(tokens / number)


def packed(lengths: Sequence[float], most: float) -> int:
    """Micro-batches of at most `most` tokens that sequences of these lengths need: first fit, the longest first."""
    room: list[float] = []
    for length in sorted(lengths, reverse=True):
        found = next((i for i, left in enumerate(room) if left >= length), None)
        if found is None:
            room.append(most - min(length, most))
        else:
            room[found] -= length
    return len(room)
