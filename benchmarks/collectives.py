"""The processor's time of collectives: as gloo's rings, as one exchange of all with all over gloo, and through memory that
ranks of one machine share.

    python -m benchmarks.collectives [RANKS ...]

For each size of a rank's tensor: milliseconds of one rank, user and system, of all threads. `MAX_EXCHANGED` is the
size up to which the exchange is used between machines. All ranks share this machine.
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
from rldsl.runtime.comm.machine_peers import share_memory
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


def measured(rank: int) -> dict[tuple[str, int], list[float]]:
    """(collective, bytes) -> as a ring, as an exchange, through shared memory."""
    found: dict[tuple[str, int], list[float]] = {(name, size): [] for name in WORK for size in SIZES}
    for way, most in (("ring", 0), ("exchange", max(SIZES)), ("memory", 0)):
        shared = share_memory([(range(dist.get_world_size()), dist.group.WORLD)], None) if way == "memory" else ()
        with mock.patch.object(collectives, "MAX_EXCHANGED", most):
            for (name, size), times in found.items():
                times.append(used(partial(WORK[name], torch.ones(size // 4))))
        del shared
    return found


def main() -> None:
    for ranks in map(int, sys.argv[1:] or ("2", "4", "8")):
        found = run_world(ranks, measured, timeout=600.0)
        print(f"{ranks} ranks" + " " * 10 + "".join(f"{size:>20,}" for size in SIZES)
              + "  bytes; ms, ring / exchange / shared memory")
        for name in WORK:
            cells = ([sum(x[name, size][i] for x in found) / ranks for i in range(3)] for size in SIZES)
            print(f"  {name:<16}" + "".join(f"{' / '.join(f'{x:.2f}' for x in cell):>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
