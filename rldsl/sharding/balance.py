"""Items into bins so that the heaviest bin is as light as possible (makespan).

In: weights. Out: the item numbers of each bin. Integers only, and ties are broken by number, so that every rank
computes the same. Longest first (Graham 1969: at most 4/3 of the best possible), then exchanges of one item for another
between the heaviest bin and the lightest ones, until the heaviest is within a thousandth of the bound or no exchange
helps. Errors: InternalError if the items do not fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heappop, heapreplace

from rldsl.diag import internal_error

# FLOPs of a layer: 24 h^2 per token and 4 h per pair of tokens, so proportional to n * (6 h + n) for n tokens; this is
# 6 h for h = 4096.
LINEAR = 24576
LIGHTEST = 4  # the number of lightest bins with which the heaviest one exchanges items
MAX_EXCHANGES_PER_BIN = 4

Items = list[tuple[int, int]]  # (weight, number), ascending


def sequence_cost(tokens: int) -> int:
    """The cost of a sequence in a transformer, up to a factor."""
    return tokens * (LINEAR + tokens)


def balance_items(weights: Sequence[int], bins: int, max_items: int) -> tuple[tuple[int, ...], ...]:
    """The items of each bin, ascending; at most `max_items` per bin."""
    chosen = _longest_first(weights, bins, max_items)
    _exchange(chosen)
    return tuple(tuple(sorted(item for _, item in items)) for items in chosen)


def _longest_first(weights: Sequence[int], bins: int, max_items: int) -> list[Items]:
    """Ties go to the bin with fewer items, then to the first."""
    if len(weights) > bins * max_items:
        raise internal_error(f"{len(weights)} items do not fit into {bins} bins of {max_items}", place="balance")
    heap = [(0, 0, bin_) for bin_ in range(bins)]
    chosen: list[Items] = [[] for _ in range(bins)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        load, count, bin_ = heap[0]
        chosen[bin_].append((weights[item], item))
        if count + 1 < max_items:
            heapreplace(heap, (load + weights[item], count + 1, bin_))
        else:
            heappop(heap)
    return [sorted(items) for items in chosen]


def _exchange(chosen: list[Items]) -> None:
    """Each exchange makes the heaviest bin lighter, and none as heavy as it was."""
    order = sorted((sum(weight for weight, _ in items), bin_) for bin_, items in enumerate(chosen))
    mean = -(-sum(x for x, _ in order) // len(chosen))
    bound = max(max((items[-1][0] for items in chosen if items), default=0), mean)
    for _ in range(MAX_EXCHANGES_PER_BIN * len(chosen)):
        top, heavy = order[-1]
        if top * 1024 <= bound * 1025:
            return
        best = min((swap for low, light in order[:LIGHTEST]
                    for swap in _swaps(chosen[heavy], chosen[light], top, low, light)), default=None)
        if best is None:
            return
        _, light, a, b, low = best
        one, other = chosen[heavy].pop(a), chosen[light].pop(b)
        insort(chosen[heavy], other)
        insort(chosen[light], one)
        order.pop()
        order.remove((low, light))
        insort(order, (top - one[0] + other[0], heavy))
        insort(order, (low + one[0] - other[0], light))


def _swaps(heavy: Items, light: Items, top: int, low: int, bin_: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(load of the heavier afterwards, bin, index in `heavy`, index in `light`, its load): for each item of `heavy`
    the two of `light` that bring the loads nearest to each other."""
    for a, (weight, _) in enumerate(heavy):
        b = bisect_left(light, (weight - (top - low) // 2, -1))
        for i in range(max(b - 1, 0), min(b + 1, len(light))):
            less = weight - light[i][0]
            if 0 < less < top - low:
                yield max(top - less, low + less), bin_, a, i, low
