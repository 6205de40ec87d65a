"""Work shared out so that the busiest has as little as possible. Integers only: every machine finds the same.

In: amounts, each with those who can take part in it. Out: how much of each everybody takes, and which stretch of a line
of things that makes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

SWEEPS = 32  # of balancing; most layouts need two

Who = TypeVar("Who", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Share(NamedTuple):
    """`who`, by its place among those that take part, has [start, stop)."""

    who: int
    start: int
    stop: int


def fill(loads: Sequence[int], amount: int) -> tuple[int, ...]:
    """`amount` poured onto `loads`, lowest first, until all that receive stand equally high (to within one)."""
    assert loads, f"nobody takes {amount}"
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


def balance(sizes: Mapping[tuple[Who, ...], int], loads: Mapping[Who, int]) -> dict[tuple[Who, ...], tuple[int, ...]]:
    """How much of each amount each of its takers takes, so that the busiest has as little as possible. loads: what
    they have already, 0 where nothing is said.

    Filling the least loaded takers of one amount, with the loads of all others kept, lowers the sum of squared loads;
    a fixed point over all amounts minimises it, and with it the largest load (load vectors form the base of a
    polymatroid; Fujishige 1980)."""
    total = dict(loads)
    shares = {takers: (0,) * len(takers) for takers in sizes}
    order = sorted(sizes, key=lambda takers: (len(takers), takers))
    for _ in range(SWEEPS):
        before = dict(shares)
        for takers in order:
            others = [total.get(who, 0) - x for who, x in zip(takers, shares[takers])]
            shares[takers] = fill(others, sizes[takers])
            total.update((who, o + x) for who, o, x in zip(takers, others, shares[takers]))
        if shares == before:
            break
    return shares


def cut(line: Iterable[tuple[Key, int]], amounts: Sequence[int]) -> Iterator[tuple[Key, Share]]:
    """A line of things of some lengths, cut at the running totals of `amounts`, which add up to its length: what each
    taker has of each thing, along the line."""
    ends = list(accumulate(amounts))
    who = at = 0
    for key, length in line:
        start = 0
        while start < length:
            while ends[who] <= at + start:
                who += 1
            stop = min(length, ends[who] - at)
            yield key, Share(who, start, stop)
            start = stop
        at += length
