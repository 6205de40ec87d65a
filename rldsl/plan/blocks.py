"""The blocks of a plan that hold events, and in which iterations of the step loop an item of a block runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rldsl.plan.base_event import EVERY_ITERATION, Event
from rldsl.plan.references import Buffer, DataName


@dataclass(frozen=True, slots=True)
class Loop:
    """`trips` iterations of the body, the same number on every rank."""

    id: str  # unique; "steps" for the loop over steps
    trips: int  # with `until` or `over`, the most
    body: tuple[Item, ...]  # of one iteration
    until: Buffer = ""  # batch-level, written by the body: where it is true the loop ends; freed in each iteration
    collects: tuple[Buffer, ...] = ()  # emptied before the first iteration; the body appends to them
    over: DataName = ""  # the data source that it reads once, in file order; the last batch may be short
    first: int = 1  # number of the first iteration; in the step loop below 1 if events run ahead


@dataclass(frozen=True, slots=True)
class When:
    """The body, in some iterations of the enclosing loop: `every`, `after` and `first` of a program. In the step loop
    it is for the steps of its events, which may run ahead of the iteration."""

    period: int  # iterations from one in which it runs to the next
    body: tuple[Item, ...]  # of one occurrence
    after: int = 0  # the first iterations, in which it does not run
    first: int = 0  # the first iterations, the only ones in which it runs; 0: no limit
    # in a step loop with a lag, by how many steps its events run ahead, on all ranks; ascending
    aheads: tuple[int, ...] = ()

    def runs(self, iteration: int) -> bool:
        """Whether it runs in an iteration, from 1."""
        return iteration % self.period == 0 and iteration > self.after and (not self.first or iteration <= self.first)

    @property
    def seldom(self) -> bool:
        """Whether a long loop has iterations in which it does not run, besides the first `after` ones."""
        return self.period > 1 or bool(self.first)

    @property
    def head(self) -> str:
        """As a program says it: "every 100", "first 50"."""
        parts = [f"every {self.period}"] if self.period != 1 or not (self.after or self.first) else []
        parts += [f"{word} {count}" for word, count in (("after", self.after), ("first", self.first)) if count]
        return " ".join(parts)


Item = Event | Loop | When


def ahead_of(item: Item) -> int:
    """By how many steps an item of the step loop runs ahead: of a block, those events that are furthest ahead. The
    events of a loop run ahead by the same number; of a `When`, each by its own."""
    return item.ahead if isinstance(item, Event) else max((ahead_of(i) for i in item.body), default=0)


def aheads_in(block: Loop | When) -> tuple[int, ...]:
    """By how many steps the events of a block run ahead, those that belong to a step; ascending."""
    def found(items: tuple[Item, ...]) -> Iterator[int]:
        for item in items:
            yield from (item.ahead,) if isinstance(item, Event) else found(item.body)

    return tuple(sorted({*found(block.body)} - {EVERY_ITERATION}))


def runs_in(iteration: int, ahead: int, steps: int, blocks: Sequence[When] = ()) -> bool:
    """Whether an item of the step loop that runs so far ahead runs in an iteration. blocks: those around it, outermost
    first.

    Iterations are numbered so that in iteration i the events of ahead 0 run for step i, of 1 to `steps`. Before
    iteration 1 and in the last iterations, only a part of the events runs. A block says for which steps its events run;
    those of every iteration run when another one of the block does, on whatever ranks."""
    if ahead == EVERY_ITERATION:
        return not blocks or any(runs_in(iteration, a, steps, blocks) for a in blocks[-1].aheads)
    return 1 <= iteration + ahead <= steps and all(b.runs(iteration + ahead) for b in blocks)
