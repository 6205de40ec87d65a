"""The order of the rows in an epoch.

In: how many rows, and keys. Out: their numbers. The same as `plan.partition.permutation`, in 8 bytes a row.
"""

from __future__ import annotations

import numpy as np

from rldsl.sharding.partition import mix

BLOCK = 1 << 20


def permutation(n: int, *keys: int) -> np.ndarray:
    """0..n-1 (int64) in a pseudo-random order that depends on `keys` alone."""
    hashes = np.empty(n, np.uint64)
    start = np.uint64(mix(mix(*keys)))
    for first in range(0, n, BLOCK):
        hashes[first : first + BLOCK] = _mix(start, np.arange(first, min(n, first + BLOCK), dtype=np.uint64))
    return np.argsort(hashes)  # no two are equal: each step of the hash can be undone


def _mix(start: np.uint64, last: np.ndarray) -> np.ndarray:
    """`mix(key, i)` for many i; start: `mix(key)`."""
    state = (start ^ last) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)
