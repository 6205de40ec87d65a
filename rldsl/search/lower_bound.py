"""What no assignment can be faster than, when some of its calls are placed already.

In: an instance, blocks of some calls. Out: seconds. A step takes at least

- the longest way from a call that uses a model's version to the training that ends it, since the next version is used
  one step later (the cycles of the steady state);
- of each block, the work of all calls that cover it, and of those inside it their work spread over its ranks.

Training on all ranks leaves no time for any other call, and neither does a `generate` on all of them for those that
need what it makes: such calls lengthen every way. A call that is not placed yet counts with its best time, and its
least work, anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from rldsl.search.space import Block

if TYPE_CHECKING:
    from rldsl.search.evaluator import Evaluator


class LowerBound:
    def __init__(self, instance: Evaluator):
        self.i = instance
        self.best: dict[tuple[int, int], float] = {}
        self.smallest: dict[tuple[int, int], tuple[int, int, int]] = {}

    def seconds(self, call: int, size: int) -> float:
        """The fastest that a call can be on so many ranks; inf where it does not fit."""
        key = (call, size)
        if key not in self.best:
            entries = self.i.table.entries(self.i.calls[call], size)
            self.best[key] = entries[0].seconds if entries else inf
        return self.best[key]

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of each call, the sizes of the blocks that it may have."""
        return tuple(tuple(dict.fromkeys(b.size for b in self.i.blocks(job, ()))) for job in self.i.calls)

    @cached_property
    def fastest(self) -> tuple[float, ...]:
        return tuple(min(self.seconds(c, n) for n in sizes) for c, sizes in enumerate(self.sizes))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds times ranks, the least."""
        return tuple(min(self.seconds(c, n) * n for n in sizes) for c, sizes in enumerate(self.sizes))

    @cached_property
    def cycles(self) -> tuple[frozenset[int], ...]:
        """Every way, as its calls, from a use of a trained model to its training."""
        jobs, place = self.i.problem.jobs, self.i.place
        found: set[frozenset[int]] = set()

        def back(n: int, way: frozenset[int], model: str) -> None:
            way = way | {place[n]} if n in place else way
            if jobs[n].model == model:
                found.add(way)
            for b in jobs[n].after:
                back(b, way, model)

        for model, home in self.i.problem.homes.items():
            back(home, frozenset(), model)
        return tuple(w for w in sorted(found, key=sorted) if not any(w < o for o in found))

    def __call__(self, blocks: Mapping[int, Block], known: Mapping[int, float] | None = None) -> float:
        """blocks: of some calls. known: seconds of those whose entries are chosen."""
        root, calls = self.i.tree.root, self.i.calls
        open_ = len(blocks) < len(calls)
        seconds = list(self.fastest) if open_ else [0.0] * len(calls)
        work = list(self.work) if open_ else seconds[:]
        for c, (start, stop) in blocks.items():
            seconds[c] = known[c] if known and c in known else self.seconds(c, stop - start)
            work[c] = seconds[c] * (stop - start)
        most = sum(work) / root.size
        whole = {c for c, b in blocks.items() if b == root}
        trains = {c for c in whole if calls[c].kind == "train"}
        for way in self.cycles:
            others = {c for c in whole if calls[c].kind == "generate" and self.below[c] >= way - {c} - trains}
            along = sum([seconds[c] for c in trains | others | way])
            if along > most:
                most = along
        placed = [(start, stop, seconds[c], work[c]) for c, (start, stop) in blocks.items()]
        for start, stop in set(blocks.values()):
            over = under = 0.0
            for first, last, took, all_ in placed:
                if first <= start and stop <= last:
                    over += took
                elif start <= first and last <= stop:
                    under += all_
            if (there := over + under / (stop - start)) > most:
                most = there
        return most

    @cached_property
    def below(self) -> tuple[frozenset[int], ...]:
        """Of each call, the calls that wait for what it makes."""
        jobs, place = self.i.problem.jobs, self.i.place
        above: list[frozenset[int]] = []
        for j in jobs:
            above.append(frozenset(j.after).union(*(above[b] for b in j.after)))
        return tuple(frozenset(place[j.number] for j in jobs if j.call and c.number in above[j.number])
                     for c in self.i.calls)

    def least(self, call: int, size: int) -> tuple[int, int, int]:
        """Static, shared and active bytes that a call takes at the least, each by itself."""
        key = (call, size)
        if key not in self.smallest:
            entries = self.i.table.entries(self.i.calls[call], size)
            none = 1 << 62
            self.smallest[key] = (min((e.static for e in entries), default=none),
                                  min((e.shared for e in entries), default=none),
                                  min((e.active for e in entries), default=none))
        return self.smallest[key]

    def bytes(self, blocks: Mapping[int, Block], inside: Block | None = None) -> int:
        """Bytes that some rank (inside a block) needs at least."""
        among = {b for b in blocks.values() if inside is None or inside.holds(b)}
        return max((self._bytes(b, blocks) for b in among), default=0)

    def _bytes(self, at: Block, blocks: Mapping[int, Block]) -> int:
        static, active = 0, 0
        shared: dict[str, int] = {}
        for c, b in blocks.items():
            if not b[0] <= at[0] or not at[1] <= b[1]:
                continue
            job = self.i.calls[c]
            path, (mine, common, runs) = self.i.problem.models[job.model].path, self.least(c, b.size)
            static += mine
            if runs > active:
                active = runs
            if common > shared.get(path, 0):
                shared[path] = common
        return static + active + sum(shared.values())
