"""Weighted sampling without replacement (Efraimidis & Spirakis 2006, "Weighted random sampling with a reservoir").

In: a weight per item, a seed, a step. Out: the positions of some items, in the order in which they were drawn: the
first with probability w / sum(w), the next in the same way among the rest, and so on. These are the items with the
largest keys log(u) / w, where u is uniform on (0, 1) and a function of the seed, the step and the item's number alone
(`draws.py`).
Invariant: a draw is the same under every placement, number of threads and restart. So keys are computed by numpy, on
one thread: a library that divides an array among threads may round differently at the ends of their parts.
"""

from __future__ import annotations

import numpy as np
import torch

from rldsl.runtime.draws import uniform


def sample_by_weight(weights: np.ndarray, count: int, seed: int, step: int,
                     numbers: np.ndarray | None = None) -> np.ndarray:
    """[min(count, weights above 0)] int64: positions in `weights`, the largest key first. An item of weight 0 is never
    drawn.

    weights: [n] float, finite and not negative. seed: below 2**63. numbers: [n] int64, distinct: the numbers of the
    items; None: their positions. Errors: ValueError for a weight that is negative or not finite."""
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError("a weight is negative or not finite")
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
