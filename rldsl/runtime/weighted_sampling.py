"""Sampling by weight without replacement (Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir").

In: a weight for each item. Out: the positions of some items, in the order in which they were drawn: the first with
probability proportional to its weight, the next among the others in the same way, and so on. An item of weight 0 is
never drawn. Each item has a random number of its own (`draws.py`), made of the seed, the step and the item's number, so
a draw depends on nothing else; it runs in numpy on one thread, since a library that divides an array among threads may
round differently at the ends of their parts.
"""

from __future__ import annotations

import numpy as np
import torch

from rldsl.runtime.draws import uniform


def sample_by_weight(weights: np.ndarray, count: int, seed: int, step: int,
                     numbers: np.ndarray | None = None) -> np.ndarray:
    """[min(count, positive weights)] int64: positions in `weights`, the largest log(u) / weight first.

    weights: [n] float, finite and not negative. numbers: [n] int64, those of the items for their random numbers; the
    positions if None."""
    positions = np.flatnonzero(weights > 0)
    items = torch.from_numpy(positions if numbers is None else np.ascontiguousarray(numbers[positions]))
    u = uniform(seed, step, items, torch.zeros_like(items)).numpy()
    keys = np.log(u) / weights[positions].astype(np.float64)
    if 0 < count < len(keys):  # only the largest are sorted
        smallest = np.partition(keys, len(keys) - count)[len(keys) - count]
        kept = np.flatnonzero(keys >= smallest)
    else:
        kept = np.arange(len(keys))
    order = np.lexsort((kept, -keys[kept]))[:count]  # of equal keys the first
    drawn: np.ndarray = positions[kept[order]]
    return drawn
