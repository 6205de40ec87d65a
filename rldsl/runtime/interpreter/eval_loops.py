"""Evaluations: a loop over all rows of a data source, once, from the first, in file order.

In: a loop of the plan that names its source, a fetch in it. Out: the number of turns, the same on every rank, and the
rows of a turn. Neither counts as reading the source in training: its position stays where it was.
Code: RL0779 the rows of an evaluation do not fit the plan, or ranks see different files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from rldsl.diag import fail
from rldsl.plan.events import Event, Fetch, Item, Loop
from rldsl.runtime.data import Source
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.step import StepState


@dataclass(frozen=True)
class InOrderSource(Source):
    """The same data read once from the first row to the last."""

    def batch(self, step: int, seed: int) -> list[int]:
        """The row numbers of a turn; fewer than a batch in the last."""
        first = step * self.data.batch
        return list(range(first, min(first + self.data.batch, len(self.table))))


def num_turns(reader: DataReader, loop: Loop) -> int:
    """How many batches the source has, the last perhaps short."""
    source = reader.source(loop.over)
    return -(-len(source.table) // source.data.batch)


def next_rows(step: StepState, reader: DataReader, event: Fetch) -> tuple[Source, int]:
    """Of what a fetch reads now, and the number of the batch: in an evaluation that of the turn, else the next one."""
    source = reader.source(event.data)
    if step.evaluated_source == event.data:
        return InOrderSource(**{f.name: getattr(source, f.name) for f in fields(source)}), step.turn
    return source, reader.next_batch(event.data)


def check_evaluations(context: RunContext, reader: DataReader, items: Sequence[Item]) -> None:
    """That the plan has room for all rows, and that the ranks of each evaluation see as many. Every rank takes part.
    Raises RL0779."""
    mine = {loop.over: loop for loop in _evaluations(items)}
    every = {loop.over: loop for loop in _evaluations(context.plan.body)}
    if not every:
        return
    seen = [len(reader.source(name).table) if name in mine else -1 for name in every]
    counts = torch.tensor(seen, dtype=torch.int64, device=context.device)
    found = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
    dist.all_gather(found, counts)
    for i, (name, loop) in enumerate(every.items()):
        data = context.data[name]
        rows = sorted({int(f[i]) for f in found} - {-1})
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
