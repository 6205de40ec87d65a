"""Which sequence has which slot of the slab, and what a lane of slots does next: decided on the host.

In: lengths of prompts, which of them are the same as the one before, and, now and then, which sequences have ended.
Out: one piece of work after another. Every rank of a shard decides alike, since it knows the same.

A *lane* is a run of slots whose sequences go through the model together; a pipeline has one for each stage. Sequences
begin in order, in whichever lane has room, so the samples of a prompt are neighbours in time, and one of them at most
waits for a prefill that another has had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rldsl.memory.decoding import NARROW, PREFILL, bucket

__all__ = ["NARROW", "PREFILL", "Begin", "Lane", "Slots", "Step", "begin", "bucket"]


@dataclass(frozen=True, slots=True)
class Begin:
    """Sequences first, first + 1, ... get `slots`, and the host asks afterwards which have ended. The first `again` of
    them have the prompt of the sequence before them, which is in slot `source`; of the rest, those in `fresh`
    (sequences) have a prompt that is new."""

    slots: tuple[int, ...]
    first: int
    again: int
    source: int
    fresh: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One token for each of the first `rows` slots of a lane, of which the slab is read up to `width`. moves: (from,
    to) slots, before. look: whether the host asks afterwards which sequences have ended."""

    rows: int
    width: int
    moves: tuple[tuple[int, int], ...]
    look: bool


@dataclass
class Lane:
    """Slots start .. start + size. held: slot -> its sequence; made: slot -> tokens of it, so far as the host knows;
    due: steps until the host looks."""

    start: int
    size: int
    held: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    due: int = 0

    def free(self) -> list[int]:
        return [s for s in range(self.start, self.start + self.size) if s not in self.held]


class Slots:
    """lens: of prompts. same: whether a sequence has the prompt of the one before. longest: the most tokens of a
    response. every: after how many steps at most the host looks. most: the most tokens of a prompt in any call, 0 where
    nobody knows; calls whose prompts are nearly as long as each other's then have slabs of one width."""

    def __init__(self, lens: Sequence[int], same: Sequence[bool], slots: int, lanes: int, longest: int, every: int,
                 most: int = 0):
        self.lens, self.same, self.longest, self.every = lens, same, longest, every
        self.cost = [0 if again else n for n, again in zip(lens, same)]
        self.waiting = 0  # sequences from here on have not begun
        self.source = 0  # the slot of the last that has
        edges = [i * slots // lanes for i in range(lanes + 1)]
        self.lanes = [Lane(a, b - a) for a, b in zip(edges, edges[1:])]
        prompt = max(lens, default=0)
        self.count, self.width = slots, max(prompt, min(bucket(prompt, NARROW, 4), most)) + longest

    @property
    def busy(self) -> bool:
        return self.waiting < len(self.lens) or any(lane.held for lane in self.lanes)

    def next(self, lane: Lane) -> Begin | Step | None:
        free = lane.free() if self.waiting < len(self.lens) else []
        some = begin(self.cost, self.waiting, len(free), lane.size)
        return self._begin(lane, free[:some]) if some else self._step(lane) if lane.held else None

    def ended(self, lane: Lane, over: Sequence[bool]) -> list[int]:
        """over: for each slot of the lane, whether its sequence has ended. The slots that are free by that."""
        found = [s for s in lane.held if over[s - lane.start]]
        for s in found:
            del lane.held[s], lane.made[s]
        ahead = self.longest - max(lane.made.values(), default=0)  # then the first of them is sure to end
        lane.due = max(1, min(self.every, ahead))
        return found

    def _begin(self, lane: Lane, slots: list[int]) -> Begin:
        first = self.waiting
        these = range(first, first + len(slots))
        fresh = tuple(i for i in these if not self.same[i])
        made = Begin(tuple(slots), first, (fresh[0] if fresh else these.stop) - first, self.source, fresh)
        lane.held.update(zip(slots, these))
        lane.made.update(dict.fromkeys(slots, 1))
        self.waiting, self.source = these.stop, slots[-1]
        return made

    def _step(self, lane: Lane) -> Step:
        rows = min(bucket(len(lane.held)), lane.size) if self.waiting == len(self.lens) else lane.size
        moves = self._compact(lane, lane.start + rows)
        width = max(self.lens[i] + lane.made[s] for s, i in lane.held.items())
        for s in lane.made:
            lane.made[s] += 1
        lane.due -= 1
        return Step(rows, min(bucket(width, NARROW, 4), self.width), moves, lane.due <= 0)

    def _compact(self, lane: Lane, end: int) -> tuple[tuple[int, int], ...]:
        """Sequences in slots from `end` on move to free ones before it."""
        room = (s for s in lane.free() if s < end)
        moves = tuple((s, next(room)) for s in sorted(lane.held) if s >= end)
        for s, to in moves:
            lane.held[to], lane.made[to] = lane.held.pop(s), lane.made.pop(s)
        return moves


def begin(cost: Sequence[int], waiting: int, free: int, slots: int) -> int:
    """How many sequences to begin now: a prefill of a few is as slow as a decoding step, so it waits for a sixteenth of
    the slots, or until its tokens are enough. cost: tokens to run for each sequence."""
    ahead = list(accumulate(cost[waiting : waiting + free]))
    some = max(1, sum(x <= PREFILL for x in ahead)) if ahead else 0
    last = waiting + some == len(cost)
    return some if 16 * free >= slots or last or ahead and ahead[-1] >= PREFILL else 0
