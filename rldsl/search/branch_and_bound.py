"""The best assignment, and a proof of how good it is: branch and bound, the most promising part of the space first.

In: an instance. Out: a `Result`. First every call gets a block, the largest calls first, then every call an entry; a
part of the space is left out when its bound shows that nothing in it is better, or better by more than the gap that is
asked for. What is found depends on nothing but the instance and the number of parts looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.greedy import choose_candidates, greedy_evaluation
from rldsl.search.reshard_costs import ReshardCost
from rldsl.search.space import Block, Strategy

GAP = 0.01  # that is good enough, unless another one is asked for
MOST = 2_000  # parts of the space that are looked at
KEPT = 16  # of the best assignments
OTHERS = 3  # strategies of a call, beside the one that was found


@dataclass(frozen=True, slots=True)
class Result:
    """best: different assignments, the fastest first; none where nothing fits. bound: seconds that no assignment of the
    space is faster than. parts: of the space looked at. complete: whether the search ended by itself."""

    best: tuple[Evaluation, ...]
    bound: float
    parts: int
    complete: bool

    @property
    def gap(self) -> float:
        return self.best[0].seconds / self.bound - 1 if self.best and self.bound else inf


Blocks = tuple[Block, ...]
Entries = tuple[Candidate, ...]
Going = Callable[["Result"], bool]


@dataclass(frozen=True, slots=True)
class SearchNode:
    """Of the space: the first calls (in the order of the search) on these blocks, and when all have one, the first
    calls with these entries, and the next with its `rest`-th fastest or a slower one. rough: its bound is a quick one,
    and it is evaluated when no other part promises more."""

    blocks: Blocks = ()
    entries: Entries = ()
    rest: int = 0
    rough: bool = False


def branch_and_bound(instance: Evaluator, gap: float = GAP, most: int = MOST, going: Going = lambda _: True) -> Result:
    """gap: 0 for the best there is. going: asked now and then; false ends the search."""
    return _BranchAndBound(instance, gap, most, going).run()


class _BranchAndBound:
    def __init__(self, instance: Evaluator, gap: float, most: int, going: Going):
        self.i, self.gap, self.most, self.going = instance, gap, most, going
        self.bound = instance.bound
        self.best: list[Evaluation] = []
        self.left_out = inf  # the least bound of what was left out for the gap
        self.heap: list[tuple[float, int, int, SearchNode]] = []  # bound, how much of it is open, number
        self.number = 0
        order = sorted(range(len(instance.calls)), key=lambda c: (-self._weight(c), c))
        homes = instance.homes
        self.order = [c for k, c in enumerate(order) if not self._follows(c)]
        self.homes = homes
        self.paths = [instance.problem.models[j.model].path for j in instance.calls]

    def _weight(self, c: int) -> float:
        work = self.bound.work[c]
        return work if work < inf else 0.0

    def _follows(self, c: int) -> bool:
        """Whether a call is a further training of its model, which runs where the first one does."""
        job = self.i.calls[c]
        return job.kind == "train" and self.i.homes[job.model] != c

    def run(self) -> Result:
        start = greedy_evaluation(self.i)
        if start is not None:
            self.keep(start)
        self.push(self.bound({}), SearchNode())
        parts, ended = 0, True
        while self.heap and self.heap[0][0] < self.enough():
            if parts >= self.most or self.best and not self.going(self.result(parts, False)):
                ended = False
                break
            least, _, _, part = heappop(self.heap)
            if part.rough:
                self.push(max(least, self.relaxed(part.blocks, ())), replace(part, rough=False))
                continue
            parts += 1
            if len(part.blocks) < len(self.order):
                self.place(part)
            else:
                self.choose(part, least)
        self.improve()
        if len(self.best) == 1:
            self.compare(self.best[0].assignment)
        return self.result(parts, ended)

    def improve(self) -> None:
        """Until no other layout of one call alone makes the best faster: a search that ends at the accepted gap must not
        leave out what its own report lists."""
        while self.best:
            now = self.best[0]
            faster = min(self.i.faster_neighbors(now.assignment, now.seconds), key=lambda j: j.seconds, default=None)
            if faster is None:
                break
            self.keep(faster)

    def compare(self, a: Assignment) -> None:
        """Where the first guess was the best, with what it would be with one call otherwise."""
        for c, job in enumerate(self.i.calls):
            others = (e for e in self.i.table.entries(job, a.blocks[c].size) if e.strategy != a.entries[c].strategy)
            for e in islice(others, OTHERS):
                entries = self.i.changed(a.entries, c, e)
                if entries is not None and self.i.fits((judged := self.i.judge(Assignment(a.blocks, entries))).bytes):
                    self.keep(judged)

    def result(self, parts: int, complete: bool) -> Result:
        found = self.best[0].seconds if self.best else inf
        top = self.heap[0][0] if self.heap else inf
        return Result(tuple(self.best), min(found, self.left_out, top), parts, complete)

    def enough(self) -> float:
        """What a bound must be below to be looked at."""
        return self.best[0].seconds / (1 + self.gap) if self.best else inf

    def push(self, least: float, part: SearchNode) -> None:
        if least == inf:
            return
        if least >= self.enough():
            self.left_out = min(self.left_out, least)
            return
        self.number += 1
        heappush(self.heap, (least, -len(part.blocks) - len(part.entries), self.number, part))

    def keep(self, found: Evaluation) -> None:
        if all(found.assignment != other.assignment for other in self.best):
            self.best = sorted([*self.best, found], key=lambda j: (j.seconds, j.bytes))[:KEPT]

    # ------------------------------------------------------------------------------------------ branching

    def place(self, part: SearchNode) -> None:
        """The next call on every block that differs."""
        c = self.order[len(part.blocks)]
        before, alike = self.given(part.blocks), self.i.alike(c)
        for b in self.i.blocks(self.i.calls[c], part.blocks):
            now, given = (*part.blocks, b), before | dict.fromkeys(alike, b)
            if not self.i.fits(self.bound.bytes(given, b)):
                continue
            self.push(self.bound(given), SearchNode(now, rough=len(now) == len(self.order)))

    def choose(self, part: SearchNode, least: float) -> None:
        """The next call with its fastest entry that is left, or with a slower one."""
        blocks, entries = part.blocks, part.entries
        if not entries and not part.rest and (quick := choose_candidates(self.i, self.every(blocks))) is not None:
            self.keep(quick)
        option, another = self.options(blocks, entries, part.rest)
        if another:
            self.push(max(least, self.relaxed(blocks, entries, part.rest + 1)), SearchNode(blocks, entries, part.rest + 1))
        now = (*entries, option)
        least = max(least, self.relaxed(blocks, now))
        if len(now) < len(self.order) or least >= self.enough():
            self.push(least, SearchNode(blocks, now))
            return
        for full in self.followed(blocks, now):
            judged = self.i.judge(full)
            if self.i.fits(judged.bytes):
                self.keep(judged)

    def given(self, blocks: Blocks) -> dict[int, Block]:
        """Call -> block, with the calls that follow another."""
        found = dict(zip(self.order, blocks, strict=False))
        for c, job in enumerate(self.i.calls):
            if self._follows(c) and self.i.homes[job.model] in found:
                found[c] = found[self.i.homes[job.model]]
        return found

    def every(self, blocks: Blocks) -> Blocks:
        """Of all calls in program order, when each has one."""
        given = self.given(blocks)
        return tuple(given[c] for c in range(len(self.i.calls)))

    def relaxed(self, blocks: Blocks, entries: Entries, rest: int = 0) -> float:
        """Seconds with all blocks placed, some entries chosen, the others the fastest that fit beside the least of all
        others (of the next call, all but the first `rest`), and parameters that move in no time where that is open."""
        known, every = dict(zip(self.order, entries, strict=False)), self.every(blocks)
        left = self.room(every, known)
        optimistic = []
        next_ = self.order[len(entries)] if len(entries) < len(self.order) else -1
        for c, job in enumerate(self.i.calls):
            if c in known:
                optimistic.append(known[c])
                continue
            quickest = next(islice(self.fitting(c, every[c], left[c]), rest if c == next_ else 0, None), None)
            if quickest is None:
                return inf
            optimistic.append(_optimistic_candidate(quickest.seconds, job.kind, every[c].size))
        return self.i.seconds(every, optimistic, self.moves(every, known))

    def options(self, blocks: Blocks, entries: Entries, rest: int) -> tuple[Candidate, bool]:
        """What the next call chooses, and whether there are slower ones."""
        known, every, c = dict(zip(self.order, entries, strict=False)), self.every(blocks), self.order[len(entries)]
        first, *more = islice(self.fitting(c, every[c], self.room(every, known)[c]), rest, rest + 2)
        return first, bool(more)

    def fitting(self, c: int, block: Block, left: tuple[int, int]) -> Iterator[Candidate]:
        """The entries of a call that leave others their least, the fastest first."""
        mine = self.i.table.entries(self.i.calls[c], block.size)
        if not self.i.table.memory:
            return iter(mine)
        return (e for e in mine if e.least <= left[1] and e.static + e.shared <= left[0])

    def moves(self, every: Blocks, known: Mapping[int, Candidate]) -> dict[int, tuple[ReshardCost, int]]:
        """Of copies: at the least what they take where all that may share one are chosen, else no time; but a copy on
        other ranks than its model's training waits for that."""
        found, seen = {}, set[tuple[object, ...]]()
        for c, job in enumerate(self.i.calls):
            home = self.i.homes.get(job.model)
            if home is None or job.kind == "train":
                continue
            move = ReshardCost()
            if home in known and all(k in known for k, o in enumerate(self.i.calls) if (
                    o.model, every[k]) == (job.model, every[c])):
                e = known[c]
                key = job.model, every[c], e.strategy.degrees
                own = every[c] == every[home] and e.strategy.degrees == known[home].strategy.degrees
                move = ReshardCost() if key in seen or own else self.i.least_move(
                    home, every[home], known[home], c, every[c], e)
                seen.add(key)
            if move.bytes or every[c] != every[home]:
                found[c] = move, home
        return found

    def room(self, every: Blocks, known: Mapping[int, Candidate]) -> list[tuple[int, int]]:
        """For each call, the bytes that it may take for good, and in all while it runs, when all others take their
        least; those of one model directory count as one."""
        if not self.i.table.memory:
            return [(0, 0)] * len(every)
        least = []
        for c in range(len(every)):
            e = known.get(c)
            least.append((e.static, e.shared, e.active) if e is not None else self.bound.least(c, every[c].size))
        there = {b: [k for k, (start, stop) in enumerate(every) if start <= b[0] and b[1] <= stop] for b in set(every)}
        out = []
        for c in range(len(every)):
            path = self.paths[c]
            kept = active = 0
            for calls in there.values():
                if c not in calls:
                    continue
                shared: dict[str, int] = {}
                static = most = 0
                for k in calls:
                    if k == c:
                        continue
                    own, common, runs = least[k]
                    static += own
                    most = max(most, runs)
                    if common and (other := self.paths[k]) != path:
                        shared[other] = max(shared.get(other, 0), common)
                static += sum(shared.values())
                kept, active = max(kept, static), max(active, static + most)
            out.append((self.i.table.memory - active, self.i.table.memory - kept))
        return out

    def followed(self, blocks: Blocks, entries: Entries) -> Iterator[Assignment]:
        """Whole assignments: further trainings of a model with every entry under the layout of the first."""
        known, every = dict(zip(self.order, entries, strict=False)), self.every(blocks)

        def fill(c: int, out: Entries) -> Iterator[Entries]:
            if c == len(self.i.calls):
                yield out
            elif c in known:
                yield from fill(c + 1, (*out, known[c]))
            else:
                home = known[self.i.homes[self.i.calls[c].model]]
                for e in self.i.table.entries(self.i.calls[c], every[c].size):
                    if e.strategy.degrees == home.strategy.degrees:
                        yield from fill(c + 1, (*out, e))

        return (Assignment(every, out) for out in fill(0, ()))


def _optimistic_candidate(seconds: float, kind: str, size: int) -> Candidate:
    """An entry that waits for as few ranks as its call ever does."""
    return Candidate(Strategy(), size, seconds, size if kind == "train" else 1, 0, 0, 0, 0)
