"""The processor's time of small collectives over gloo: as one exchange of all with all, and as gloo's rings.

    python -m benchmarks.collectives [RANKS ...]

For each size of a rank's tensor: milliseconds of one rank, user and system, of all threads. `MAX_EXCHANGED` is the
size up to which the exchange is used. All ranks share this machine.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

from rldsl.runtime import collectives
from tests.world import run_world

SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 17, 1 << 18, 1 << 20)  # bytes
TIMES = 50
WORK: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": collectives.all_reduce, "all_gather": collectives.all_gather,
    "reduce_scatter": lambda x: collectives.reduce_scatter(x.expand(dist.get_world_size(), -1))}


def used(call: Callable[[], object]) -> float:
    """Milliseconds of this rank."""
    call()
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(TIMES):
        call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000 / TIMES


def measured(rank: int) -> dict[tuple[str, int], tuple[float, float]]:
    """(collective, bytes) -> as a ring, as an exchange."""
    found = {}
    for name, work in WORK.items():
        for size in SIZES:
            once = partial(work, torch.ones(size // 4))
            with mock.patch.object(collectives, "SMALL", 0):
                ring = used(once)
            with mock.patch.object(collectives, "SMALL", max(SIZES)):
                found[name, size] = ring, used(once)
    return found


def main() -> None:
    for ranks in map(int, sys.argv[1:] or ("2", "4", "8")):
        found = run_world(ranks, measured, timeout=600.0)
        print(f"{ranks} ranks" + " " * 10 + "".join(f"{size:>16,}" for size in SIZES) + "  bytes; ms, ring / exchange")
        for name in WORK:
            cells = ([sum(x[name, size][i] for x in found) / ranks for i in (0, 1)] for size in SIZES)
            print(f"  {name:<16}" + "".join(f"{f'{ring:.2f} / {one:.2f}':>16}" for ring, one in cells), flush=True)


if __name__ == "__main__":
    main()
