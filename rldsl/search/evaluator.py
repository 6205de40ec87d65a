"""A problem with everything that judging an assignment takes.

In: a problem. Out: seconds and bytes of assignments. An assignment says for every call, in program order, its block and
its entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rldsl.memory.parameters import resting
from rldsl.reshard.rounds import BUCKET
from rldsl.search.call_costs import Candidate
from rldsl.search.candidates import CandidateTable
from rldsl.search.isolated_call import machine_of
from rldsl.search.lower_bound import LowerBound
from rldsl.search.overheads import Overheads
from rldsl.search.problem import FixedCall, Job, Problem
from rldsl.search.reshard_costs import ReshardCost, ReshardCosts
from rldsl.search.space import Block
from rldsl.search.step_time import Orders, StepSchedule, schedule_step, step_seconds

KEPT = 1 << 14  # scripts that are remembered


@dataclass(frozen=True, slots=True)
class Assignment:
    blocks: tuple[Block, ...]
    entries: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """seconds: of a steady step. bytes: of the fullest rank. keep: copies of trained models stay from step to step,
    which needs more memory and fits."""

    assignment: Assignment
    seconds: float
    bytes: int
    keep: bool


class Evaluator:
    def __init__(self, problem: Problem, reserve: int = 0, offload: bool = False):
        """reserve: bytes of a device that are kept free. offload: whether it is tried."""
        self.problem, self.calls, self.tree = problem, problem.calls, problem.tree
        self.table = CandidateTable(problem, reserve, offload)
        self.machine = machine_of(problem)
        self.moves, self.overheads = ReshardCosts(problem, self.machine), Overheads(problem, self.machine)
        self.place = {j.number: i for i, j in enumerate(self.calls)}
        self._scripts: dict[tuple[Block, ...], StepSchedule] = {}
        self._orders: Orders = {}
        self._held: dict[tuple[object, ...], int] = {}
        self.bound = LowerBound(self)

    @cached_property
    def homes(self) -> Mapping[str, int]:
        """Model -> the place of its (first) train call among the calls."""
        return {m: self.place[n] for m, n in self.problem.homes.items()}

    @cached_property
    def given(self) -> tuple[Block, ...]:
        """The blocks of calls that stay where the program has them."""
        return tuple(f.block for _, f in sorted(self.problem.fixed.items()) if f.block is not None)

    def blocks(self, job: Job, used: Sequence[Block]) -> Iterator[Block]:
        """Where a call may run, but for what is alike: given blocks are in use before anything is placed."""
        fixed = self.problem.fixed.get(job.number, FixedCall()).block
        return iter([fixed]) if fixed is not None else self.tree.different((*self.given, *used))

    def alike(self, c: int) -> tuple[int, ...]:
        """A call, or all trainings of the model that it trains: they stand under one layout."""
        job = self.calls[c]
        return tuple(k for k, o in enumerate(self.calls) if k == c or job.kind == o.kind == "train"
                     and job.model == o.model)

    def script(self, blocks: Sequence[Block]) -> StepSchedule:
        key = tuple(blocks)
        if key not in self._scripts:
            if len(self._scripts) >= KEPT:
                self._scripts.clear()
                self._orders.clear()
            lead = [key[self.place[j.lead]] for j in self.problem.jobs]
            self._scripts[key] = schedule_step(self.problem, self.overheads, lead, self._orders)
        return self._scripts[key]

    # ------------------------------------------------------------------------------------------- entries

    def resolved(self, blocks: Sequence[Block], entries: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """With calls that stand as their model is trained on what is trained, and others on a copy."""
        out = []
        for job, block, e in zip(self.calls, blocks, entries, strict=True):
            home = self.homes.get(job.model)
            if home is not None and job.kind != "train":
                own = block == blocks[home] and e.strategy.degrees == entries[home].strategy.degrees
                if own or e.own:
                    away = own and entries[home].strategy.offload
                    e = self.table.cost(job, replace(e.strategy, offload=away), e.size, own)
            out.append(e)
        return tuple(out)

    def changed(self, entries: Sequence[Candidate], c: int, e: Candidate) -> tuple[Candidate, ...] | None:
        """With another entry of one call; other trainings of its model follow under its layout, if they can."""
        out = list(entries)
        for k in self.alike(c):
            if k == c:
                out[k] = e
            elif entries[k].strategy.degrees != e.strategy.degrees:
                same = [x for x in self.table.entries(self.calls[k], e.size)
                        if x.strategy.degrees == e.strategy.degrees]
                if not same:
                    return None
                out[k] = same[0]
        return tuple(out)

    def neighbors(self, a: Assignment, c: int) -> Iterator[tuple[Candidate, Evaluation]]:
        """The assignment with each other layout of call `c` on the same ranks, whether it fits or not."""
        for e in self.table.entries(self.calls[c], a.blocks[c].size):
            if e.strategy.degrees != a.entries[c].strategy.degrees:
                entries = self.changed(a.entries, c, e)
                if entries is not None:
                    yield e, self.judge(Assignment(a.blocks, entries))

    def faster_neighbors(self, a: Assignment, seconds: float) -> Iterator[Evaluation]:
        """Those that fit and take less time, of every call whose layout is free."""
        for c, job in enumerate(self.calls):
            if self.problem.fixed.get(job.number, FixedCall()).strategy is None:
                yield from (found for _, found in self.neighbors(a, c)
                            if found.seconds < seconds and self.fits(found.bytes))

    def copies(self, blocks: Sequence[Block], entries: Sequence[Candidate]) -> dict[int, tuple[ReshardCost, int]]:
        """Place of the first call that uses a copy -> its move, and the place of its model's train call."""
        found: dict[int, tuple[ReshardCost, int]] = {}
        seen: set[tuple[object, ...]] = set()
        for i, (job, block, e) in enumerate(zip(self.calls, blocks, entries, strict=True)):
            home = self.homes.get(job.model)
            key = (job.model, block, e.strategy.degrees)
            if home is None or job.kind == "train" or e.own or key in seen:
                continue
            seen.add(key)
            move = self.moves(job.model, blocks[home], entries[home].strategy, block, e.strategy)
            if move.copied:
                found[i] = move, home
        return found

    def least_move(self, home: int, src: Block, mine: Candidate, c: int, dst: Block, e: Candidate) -> ReshardCost:
        """Of bringing a copy up to date no more than it takes, without working out its paths. home, mine: the training.
        The fullest rank of the copy lacks at least what no rank holds so much of; and what the devices of a node do not
        hold together enters it over the network, by all of them at best."""
        model, gpus = self.calls[c].model, self.problem.cluster.gpus
        known = self.moves.seen(model, src, mine.strategy, dst, e.strategy)
        if known is not None:
            return known
        need, have = self._fullest(c, e), self._fullest(home, mine)
        same_node = src.start // gpus <= (dst.stop - 1) // gpus and dst.start // gpus <= (src.stop - 1) // gpus
        there = gpus if same_node else 0
        return self.moves.least(model, need - (have if src.meets(dst) else 0), (need - there * have) // gpus)

    def _fullest(self, c: int, e: Candidate) -> int:
        """Elements of its model that a rank holds between calls, at the most."""
        key = self.calls[c].model, e.size, e.strategy.degrees
        if key not in self._held:
            world = self.table.world(self.calls[c], e.strategy, e.size, self.calls[c].kind == "train")
            self._held[key] = max(map(resting, world.fullest))
        return self._held[key]

    # ------------------------------------------------------------------------------------------- judging

    def judge(self, a: Assignment) -> Evaluation:
        entries = self.resolved(a.blocks, a.entries)
        moves = self.copies(a.blocks, entries)
        every = range(len(entries))  # three steps may be too few to see what holds a long run up
        least = self.bound(dict(zip(every, a.blocks, strict=True)), {c: entries[c].seconds for c in every})
        found = max(self.seconds(a.blocks, entries, moves), least)
        kept = self.bytes(a.blocks, entries, moves, keep=True)
        keep = self.fits(kept)
        bytes = kept if keep else self.bytes(a.blocks, entries, moves)
        return Evaluation(Assignment(a.blocks, entries), found, bytes, keep)

    def seconds(self, blocks: Sequence[Block], entries: Sequence[Candidate],
                moves: Mapping[int, tuple[ReshardCost, int]]) -> float:
        numbers = [j.number for j in self.calls]
        seconds, units = [0.0] * len(self.problem.jobs), [0] * len(self.problem.jobs)
        for n, e in zip(numbers, entries, strict=True):
            seconds[n], units[n] = e.seconds, 0 if e.unit == e.size else e.unit
        return step_seconds(self.problem, self.script(blocks), seconds, units,
                    {numbers[i]: (m, numbers[home]) for i, (m, home) in moves.items()},
                    {n: e.away for n, e in zip(numbers, entries, strict=True) if e.away})

    def bytes(self, blocks: Sequence[Block], entries: Sequence[Candidate],
              moves: Mapping[int, tuple[ReshardCost, int]], keep: bool = False) -> int:
        """Of the fullest atom: what is always there, and at each call what it needs with the copies that are still used
        later in the step. keep: copies stay to the end of the step."""
        s = self.script(blocks)
        order = [self.place[n] for n in s.jobs if n in self.place]
        on = [s.on[j.number] for j in self.calls]
        last: dict[tuple[object, ...], tuple[int, int, int]] = {}  # copy -> position of its last use, bytes, a call
        for at, i in enumerate(order):
            if entries[i].copy and (i in moves or self._again(i, blocks, entries, moves)):
                room = moves[i][0].room if i in moves else 0
                last[self.calls[i].model, blocks[i], entries[i].strategy.degrees] = len(order) if keep else at, \
                    entries[i].copy + room, i
        most = 0
        for a in range(len(s.atoms)):
            here = [i for i in order if a in on[i]]
            shared: dict[tuple[object, ...], int] = defaultdict(int)
            for i in here:
                key = self.sharing(i, blocks[i], entries[i])
                shared[key] = max(shared[key], entries[i].shared)
            static = sum(shared.values()) + sum(entries[i].static for i in here)
            copies = [(at, size) for at, size, i in last.values() if a in on[i]]
            for at, i in enumerate(order):
                if a in on[i]:
                    most = max(most, static + entries[i].active + sum(size for end, size in copies if end >= at))
        return most

    def roughly(self, blocks: Sequence[Block], entries: Sequence[Candidate]) -> int:
        """Bytes as if every copy came over the network, without working out how."""
        found = self.resolved(blocks, entries)
        moves = {i: (ReshardCost(room=BUCKET // 2), self.homes[self.calls[i].model]) for i, e in enumerate(found) if e.copy}
        return self.bytes(blocks, found, moves)

    def sharing(self, i: int, block: Block, e: Candidate) -> tuple[object, ...]:
        """Equal for calls that hold the same slices of a directory, or of a model that others write. Where tensor
        parallelism alone divides a model, a rank has the same part on every block."""
        model, s = self.problem.models[self.calls[i].model], e.strategy
        what = (model.name,) if model.sources and not model.base else (model.path, model.kind, model.dtype)
        where = (block,) if s.pp > 1 or s.ep > 1 else (block.start % s.tp,)
        return *what, *where, s.tp, s.pp, s.ep, s.backend

    def _again(self, i: int, blocks: Sequence[Block], entries: Sequence[Candidate],
               moves: Mapping[int, tuple[ReshardCost, int]]) -> bool:
        """Whether the copy of a call is one that an earlier call brought."""
        mine = (self.calls[i].model, blocks[i], entries[i].strategy.degrees)
        return any((self.calls[k].model, blocks[k], entries[k].strategy.degrees) == mine for k in moves)

    def fits(self, bytes: int) -> bool:
        return self.table.fits(bytes)
