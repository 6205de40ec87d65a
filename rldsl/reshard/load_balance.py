"""Min-max load balancing with integers, so that every machine computes the same shares.

In: amounts of work, each with the takers that may share it. Out: how much of each amount every taker gets, and which
interval of a sequence of items that is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

from rldsl.diag import internal_error

SWEEPS = 32  # at most; most layouts converge after two

Taker = TypeVar("Taker", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Share(NamedTuple):
    """One taker has [start, stop) of an item."""

    who: int  # position among the takers
    start: int  # first element
    stop: int  # one more than the last


def water_fill(loads: Sequence[int], amount: int) -> tuple[int, ...]:
    """Water filling: `amount` is added to the lowest `loads` until all that receive some are equal to within one. Out:
    what is added to each. Errors: InternalError if there is nothing to add to."""
    if not loads:
        raise internal_error(f"there is no receiver for {amount} elements", place="resharding")
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    total = amount
    for count, i in enumerate(order, 1):
        total += loads[i]
        if count == len(order) or total <= count * loads[order[count]]:
            break
    level, extra = divmod(total, count)
    added = [0] * len(loads)
    for position, i in enumerate(order[:count]):
        added[i] = level - loads[i] + (position < extra)
    return tuple(added)


def balance(sizes: Mapping[tuple[Taker, ...], int],
            loads: Mapping[Taker, int]) -> dict[tuple[Taker, ...], tuple[int, ...]]:
    """How much of each amount each of its takers gets, so that the largest load is minimal. sizes: takers -> amount.
    loads: what takers have already (0 if absent).

    Water filling over the takers of one amount, with all other loads fixed, lowers the sum of squared loads. A fixed
    point over all amounts minimises that sum, and with it the largest load, since load vectors form the base of a
    polymatroid (Fujishige 1980)."""
    total = dict(loads)
    shares = {takers: (0,) * len(takers) for takers in sizes}
    shared = sorted((takers for takers in sizes if len(takers) != 1), key=lambda takers: (len(takers), takers))
    for takers, amount in sizes.items():
        if len(takers) == 1:  # there is no choice
            shares[takers] = (amount,)
            total[takers[0]] = total.get(takers[0], 0) + amount
    for _ in range(SWEEPS if shared else 0):
        changed = False
        for takers in shared:
            others = [total.get(who, 0) - x for who, x in zip(takers, shares[takers], strict=True)]
            share = water_fill(others, sizes[takers])
            if share != shares[takers]:
                shares[takers], changed = share, True
                total.update((who, o + x) for who, o, x in zip(takers, others, share, strict=True))
        if not changed:
            break
    return shares


def cut_at(items: Iterable[tuple[Key, int]], amounts: Sequence[int]) -> Iterator[tuple[Key, Share]]:
    """A sequence of (item, length), cut at the running totals of `amounts`, which add up to its length: which interval
    of which item each taker has, in order."""
    ends = list(accumulate(amounts))
    who = at = 0
    for key, length in items:
        start = 0
        while start < length:
            while ends[who] <= at + start:
                who += 1
            stop = min(length, ends[who] - at)
            yield key, Share(who, start, stop)
            start = stop
        at += length
