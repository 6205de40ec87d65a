"""Evaluations: a loop over all rows of a data source, once, from the first, in file order.

In: a loop of the plan that names its source, a fetch in it. Out: the number of iterations, the same on every rank, and
the rows of one. An evaluation does not change the position at which training reads the source.
Code: RL0779 the rows of an evaluation do not fit the plan, or ranks see different files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from rldsl.diag import fail
from rldsl.plan.events import Event, Item, Loop
from rldsl.runtime.collectives import all_gather
from rldsl.runtime.data import Source
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.step import StepState


@dataclass(frozen=True)
class InOrderSource(Source):
    """The same data read once from the first row to the last."""

    def batch(self, step: int, seed: int) -> list[int]:
        """The row numbers of iteration `step`; fewer than a batch in the last."""
        first = step * self.data.batch
        return list(range(first, min(first + self.data.batch, len(self.table))))


def num_iterations(reader: DataReader, loop: Loop) -> int:
    """How many batches the source has; the last may be short."""
    source = reader.source(loop.over)
    return -(-len(source.table) // source.data.batch)


def next_rows(step: StepState, reader: DataReader, data: str) -> tuple[Source, int]:
    """The source that a fetch of `data` reads, and the number of its batch: in an evaluation the loop's iteration,
    otherwise the next batch of training."""
    source = reader.source(data)
    if step.evaluated_source == data:
        return InOrderSource(**{f.name: getattr(source, f.name) for f in fields(source)}), step.iteration
    return source, reader.next_batch(data)


def check_evaluations(context: RunContext, reader: DataReader, items: Sequence[Item]) -> None:
    """Check that the plan has room for all rows of each evaluation, and that its ranks see equally many. items: those
    of this rank. Every rank takes part. Errors: RL0779."""
    evaluated_here = {loop.over for loop in _evaluations(items)}
    evaluations = {loop.over: loop for loop in _evaluations(context.plan.body)}
    if not evaluations:
        return
    counts = torch.tensor([len(reader.source(name).table) if name in evaluated_here else -1 for name in evaluations],
                          dtype=torch.int64, device=context.device)
    counts_by_rank = all_gather(counts).tolist()
    for i, (name, loop) in enumerate(evaluations.items()):
        data = context.data[name]
        rows = sorted({rank_counts[i] for rank_counts in counts_by_rank} - {-1})
        if len(rows) > 1:
            raise fail("RL0779", f"ranks see different files under this name, with {rows[0]} and {rows[-1]} rows",
                       place=data.path, help="give every machine the same data")
        if rows and rows[0] > loop.trips * data.batch:
            raise fail("RL0779",
                       f"this data has {rows[0]} rows, but `eval {name}` allows at most {loop.trips} batches of "
                       f"{data.batch}", place=data.path,
                       help=f"write `eval {name} max {-(-rows[0] // data.batch)}` and compile again")


def _evaluations(items: Sequence[Item]) -> Iterator[Loop]:
    for item in items:
        if not isinstance(item, Event):
            if isinstance(item, Loop) and item.over:
                yield item
            yield from _evaluations(item.body)
