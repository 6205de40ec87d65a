"""Sequences over data-parallel ranks: how near to even, and at what cost, beside Karmarkar and Karp's differencing.

    python -m benchmarks.balance          # 4,096 sequences over 512 ranks and smaller; Karmarkar-Karp takes seconds

Lengths are lognormal, with and without a limit. A sequence costs what it costs a transformer (`sharding/balance.py`).
The bound: the mean over ranks, or the costliest sequence. Gates: makespan / bound 1.01, CPU time 10 ms (goals 1.002, 5
ms), for the largest case; where a rank has a few sequences only, no division may be so near. """

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from rldsl.sharding.balance import balance_items, sequence_cost

Parts = Sequence[Sequence[int]]
SIZES = ((4096, 512), (1024, 128), (256, 32), (4096, 64), (512, 8))
SEEDS = 5


def karmarkar_karp(weights: Sequence[int], shards: int) -> Parts:
    """The largest differencing method (1982): partial divisions, those with the largest spread merged first, the
    heaviest shard of one with the lightest of the other."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for i, weight in enumerate(weights):
        heap.append((-weight, i, [(weight, [i])] + [(0, [])] * (shards - 1)))  # heaviest first
    heapify(heap)
    while len(heap) > 1:
        (_, i, one), (_, _, other) = heappop(heap), heappop(heap)
        merged = sorted(((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other))), key=lambda z: -z[0])
        heappush(heap, (merged[-1][0] - merged[0][0], i, merged))
    return [items for _, items in heap[0][2]]


def contiguous(weights: Sequence[int], shards: int) -> Parts:
    n = len(weights)
    return [range(i * n // shards, (i + 1) * n // shards) for i in range(shards)]


def lengths(count: int, seed: int, limit: int) -> list[int]:
    rng = random.Random(seed)
    return [min(limit, 1 + int(rng.lognormvariate(math.log(700), 0.8))) for _ in range(count)]


def measured(method: Callable[[Sequence[int], int], Parts], weights: Sequence[int], shards: int) -> tuple[float, float]:
    """(makespan / bound, CPU ms)"""
    start = time.process_time()
    parts = method(weights, shards)
    spent = (time.process_time() - start) * 1e3
    bound = max(max(weights), -(-sum(weights) // shards))
    return max(sum(weights[i] for i in part) for part in parts) / bound, spent


def main() -> int:
    """0 where the gates are kept."""
    methods = {"here": lambda w, k: balance_items(w, k, len(w)), "Karmarkar-Karp": karmarkar_karp, "contiguous": contiguous}
    good = True
    for (count, shards), limit in ((s, x) for s in SIZES for x in (1 << 30, 2048)):
        print(f"{count} sequences over {shards} ranks" + (f", at most {limit} tokens" if limit < 1 << 30 else ""))
        for name, method in methods.items():
            seeds = range(1 if name == "Karmarkar-Karp" and count * shards > 10**6 else SEEDS)
            found = [measured(method, [sequence_cost(x) for x in lengths(count, seed, limit)], shards) for seed in seeds]
            worst, spent = max(x for x, _ in found), statistics.median(x for _, x in found)
            print(f"  {name:15} makespan / bound {worst:.4f}   CPU {spent:8.2f} ms", flush=True)
            if name == "here" and (count, shards) == SIZES[0]:
                good &= worst <= 1.01 and spent <= 10
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
