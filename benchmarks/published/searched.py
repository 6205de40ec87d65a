"""What the search finds on the hardware of a published row, with its certified gap. All modelled.

In: a row. Out: the placement, its predicted step and the proven gap. Memory is that of our own runtime, which holds the
state of training and of generation at the same time; so a row that a system runs by unloading one of them may not fit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.prediction import cluster_of, lengths_of, make_model, sets_of
from benchmarks.published.rows import SPREAD, Row
from rldsl import api
from rldsl.models.families import describe
from rldsl.search import Options, find_placement, prepare_program, unless_locked


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a search."""

    seconds: float  # simulated, of a step
    gap: float  # certified
    placement: tuple[str, ...]  # a line for each call


def search(row: Row, folder: Path, seconds: float, lag: int = 0, spread: float = SPREAD) -> Found:
    """seconds: of CPU time, after which the search ends. Raises Failure where nothing fits."""
    make_model(folder, row.model)
    cluster = cluster_of(row)
    memory = int(cluster.memory_gb * 1e9)
    graph = api.build_graph(api.read_source(f"{row.program}.rlf"), sets_of(row) | {"lag": lag,
                                                                                "memory": cluster.memory_gb})
    p = prepare_program(graph, "", cluster, memory, unless_locked(graph, ()), describe)
    begin = time.process_time()
    answer = find_placement(p, cluster, memory, Options(
        lengths=lengths_of(row, spread), should_continue=lambda _: time.process_time() - begin < seconds))
    best = answer.best[0]
    calls = zip(answer.evaluator.calls, best.evaluation.assignment.blocks, best.evaluation.assignment.candidates,
                strict=True)
    return Found(best.seconds, answer.gap, tuple(
        f"{j.name} on {b.start}:{b.stop} {e.strategy.text()}" for j, b, e in calls))
