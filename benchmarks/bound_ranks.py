"""The least time of a GRPO step that is divided over ranks, for `benchmarks/bound.py`.

In: a model and the lengths of a step. Out: CPU seconds of each phase of a rank, the mean over ranks. As many processes
as there are ranks measure at once, each its share of the prompts (`bound_least.py`), since they share caches and memory
as the ranks do. Neither messages nor waiting for the slowest rank are counted.
"""

from __future__ import annotations

import multiprocessing
import statistics
from threading import Barrier

import torch

from benchmarks.bound_least import Decoder, Lengths, Machine, least_times
from rldsl.backends.torch.kernels.kept_memory import keep_freed_memory

Phases = dict[str, float]


def shares(lengths: Lengths, ranks: int) -> list[Lengths]:
    """Prompts next to one another, with all their responses, of each rank."""
    cuts = [len(lengths.prompts) * i // ranks for i in range(ranks + 1)]
    n = lengths.n
    return [Lengths(lengths.prompts[a:b], n, lengths.responses[a * n : b * n]) for a, b in zip(cuts, cuts[1:])]


def least_of_ranks(path: str, lengths: Lengths, ranks: int) -> Phases:
    """path: of a model directory."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(ranks) as pool:
        start = manager.Barrier(ranks)
        found = pool.starmap(_measure, [(path, share, start) for share in shares(lengths, ranks)], chunksize=1)
    return {name: statistics.mean(phases[name] for phases in found) for name in found[0]}


def _measure(path: str, lengths: Lengths, start: Barrier) -> Phases:
    torch.set_num_threads(1)
    keep_freed_memory()  # as a rank does, whose weights are in large pages then
    machine = Machine(Decoder.of(path))
    start.wait()
    return least_times(machine, lengths)
