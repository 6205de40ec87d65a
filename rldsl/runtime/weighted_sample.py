"""Rows drawn at random without replacement, with or without weights: in: the numbers of rows, their weights, a seed.
Out: which of them are drawn, the same under every placement, order of arrival and restart.

The scheme is successive sampling: the first row is drawn with probability w / sum(w), the next in the same way among
the rest, and so on. Efraimidis & Spirakis 2006 ("Weighted random sampling with a reservoir"): these are the k rows
with the largest keys log(u) / w, with u uniform on (0, 1) and a function of the seed and the number of the row alone.
"""

from __future__ import annotations

import torch

from rldsl.runtime.draws import uniform


def weighted_sample(numbers: torch.Tensor, weights: torch.Tensor | None, k: int, seed: int, step: int) -> torch.Tensor:
    """Positions in `numbers` of the rows that are drawn, ascending: [min(k, rows with a weight above 0)] int64.

    numbers: [S] int64, distinct, ascending. weights: [S], at least 0 and finite; None: all rows are equally likely.
    seed: below 2**63. Errors: ValueError for a weight that is negative or not finite."""
    keys = uniform(seed, step, numbers, torch.zeros_like(numbers)).log()
    if weights is None:
        positive = torch.ones_like(numbers, dtype=torch.bool)
    else:
        wide = weights.to(torch.float64)
        if not bool((wide.isfinite() & (wide >= 0)).all()):
            raise ValueError("a weight is negative or not finite")
        positive = wide > 0
        keys = keys / wide.where(positive, torch.ones_like(wide))
    candidates = positive.nonzero().flatten()
    order = keys[candidates].sort(descending=True, stable=True).indices  # of equal keys the row with the lower number
    return candidates[order[:k]].sort().values
