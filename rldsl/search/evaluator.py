"""The time and memory of an assignment, without compiling it.

In: a problem, an assignment: the block and the candidate of every call, in program order. Out: an `Evaluation`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from rldsl.reshard.rounds import BUCKET
from rldsl.search.call_costs import Candidate
from rldsl.search.candidates import CandidateTable
from rldsl.search.isolated_call import machine_of
from rldsl.search.lower_bound import LowerBound
from rldsl.search.overheads import Overheads
from rldsl.search.problem import FixedCall, Problem
from rldsl.search.reshard_bounds import ReshardBounds
from rldsl.search.reshard_costs import ReshardCost, ReshardCosts
from rldsl.search.space import Block
from rldsl.search.step_time import Orders, StepSchedule, schedule_step, step_seconds

MAX_SCHEDULES = 1 << 14  # cached schedules; the cache is emptied when it is full


@dataclass(frozen=True, slots=True)
class Assignment:
    """One entry per call, in program order."""

    blocks: tuple[Block, ...]  # ranks of each call
    candidates: tuple[Candidate, ...]  # degrees and options of each call


@dataclass(frozen=True, slots=True)
class Neighbor:
    """An assignment that differs from another one in one call, with all trainings of its model."""

    candidate: Candidate  # of that call
    assignment: Assignment  # not evaluated yet


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An assignment with its estimated time and memory."""

    assignment: Assignment  # what is judged
    seconds: float  # per step, in the steady state
    bytes: int  # peak of the fullest rank
    keeps_copies: bool  # whether copies of trained models stay from step to step: needs more memory, and fits


# The train call of a model, its block and candidate, a call that uses the model, its block and candidate -> the cost of
# bringing the parameters from the first to the second.
CostOf = Callable[[int, Block, Candidate, int, Block, Candidate], ReshardCost]


class Evaluator:
    """Calls are named by their index in `problem.calls`."""

    def __init__(self, problem: Problem, reserve: int = 0):
        """reserve: bytes per device that are kept free."""
        self.problem, self.calls, self.tree = problem, problem.calls, problem.tree
        self.table = CandidateTable(problem, reserve)
        self.machine = machine_of(problem)
        self.reshard_costs = ReshardCosts(problem, self.machine)
        self.overheads = Overheads(problem, self.machine)
        self.reshard_bounds = ReshardBounds(problem, self.table, self.reshard_costs)
        self.bound = LowerBound(problem, self.table, self.reshard_bounds)
        self._schedules: dict[tuple[Block, ...], StepSchedule] = {}
        self._orders = Orders()

    def tied_calls(self, c: int) -> tuple[int, ...]:
        """The call itself, and for a train call all train calls of its model: they share one layout."""
        job = self.calls[c]
        return tuple(k for k, o in enumerate(self.calls) if k == c or job.kind == o.kind == "train"
                     and job.model == o.model)

    def schedule(self, blocks: Sequence[Block]) -> StepSchedule:
        key = tuple(blocks)
        if key not in self._schedules:
            if len(self._schedules) >= MAX_SCHEDULES:
                self._schedules.clear()
                self._orders.orders.clear()
            job_blocks = [key[self.problem.call_index[j.placed_with]] for j in self.problem.jobs]
            self._schedules[key] = schedule_step(self.problem, self.overheads, job_blocks, self._orders)
        return self._schedules[key]

    # ---------------------------------------------------------------------------------------- candidates

    def resolve_copies(self, blocks: Sequence[Block], candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Calls of a trained model that have the block and degrees of its training use the trained parameters; all
        other calls of it use a copy."""
        resolved = []
        for job, block, e in zip(self.calls, blocks, candidates, strict=True):
            train = self.problem.train_index.get(job.model)
            if train is not None and job.kind != "train":
                own = block == blocks[train] and e.strategy.degrees == candidates[train].strategy.degrees
                if own or e.on_trained_params:
                    offload = own and candidates[train].strategy.offload
                    e = self.table.candidate(job, replace(e.strategy, offload=offload), e.size, own)
            resolved.append(e)
        return tuple(resolved)

    def with_candidate(self, candidates: Sequence[Candidate], c: int, e: Candidate) -> tuple[Candidate, ...] | None:
        """The candidates with `e` for call `c`. Other trainings of its model get its layout; None if one cannot."""
        changed = list(candidates)
        for k in self.tied_calls(c):
            if k == c:
                changed[k] = e
            elif candidates[k].strategy.degrees != e.strategy.degrees:
                same = [x for x in self.table.candidates(self.calls[k], e.size)
                        if x.strategy.degrees == e.strategy.degrees]
                if not same:
                    return None
                changed[k] = same[0]
        return tuple(changed)

    def neighbors(self, a: Assignment, c: int) -> Iterator[Neighbor]:
        """The assignment with each other layout of call `c` on the same ranks, or the same one with or without offload,
        whether it fits or not."""
        now = a.candidates[c].strategy
        for e in self.table.candidates(self.calls[c], a.blocks[c].size):
            if (e.strategy.degrees, e.strategy.offload) != (now.degrees, now.offload):
                candidates = self.with_candidate(a.candidates, c, e)
                if candidates is not None:
                    yield Neighbor(e, Assignment(a.blocks, candidates))

    def fastest_neighbor(self, neighbors: Iterable[Neighbor], limit: float = inf,
                         without: Collection[Assignment] = ()) -> tuple[Neighbor, Evaluation] | None:
        """The first of the fastest that fit and take less than `limit` seconds. without: evaluated assignments to leave
        out. They are evaluated in the order of a lower bound, which plans no routes, until it reaches the best."""
        bounds = sorted((self.min_seconds(n.assignment), k, n) for k, n in enumerate(neighbors))
        best: tuple[float, int, Neighbor, Evaluation] | None = None
        for bound, k, n in bounds:
            if bound >= limit or best is not None and bound > best[0]:
                break
            found = self.evaluate(n.assignment)
            better = best is None or (found.seconds, k) < best[:2]
            if better and found.seconds < limit and self.fits(found.bytes) and found.assignment not in without:
                best = found.seconds, k, n, found
        return best[2:] if best is not None else None

    def free_neighbors(self, a: Assignment) -> Iterator[Neighbor]:
        """The neighbors of every call whose layout is free."""
        for c, job in enumerate(self.calls):
            if self.problem.fixed.get(job.number, FixedCall()).strategy is None:
                yield from self.neighbors(a, c)

    def min_seconds(self, a: Assignment) -> float:
        """A lower bound on the seconds of a step, without planning routes."""
        candidates = self.resolve_copies(a.blocks, a.candidates)
        reshards = self._reshards(a.blocks, candidates, self.reshard_bounds.min_cost)
        return self._seconds_with_bound(a.blocks, candidates, reshards)

    def reshards_of_copies(self, blocks: Sequence[Block],
                           candidates: Sequence[Candidate]) -> dict[int, tuple[ReshardCost, int]]:
        """The first call that uses a copy -> (the cost of its reshard, its model's train call)."""
        return self._reshards(blocks, candidates, self._planned_cost)

    def _reshards(self, blocks: Sequence[Block], candidates: Sequence[Candidate],
                  cost_of: CostOf) -> dict[int, tuple[ReshardCost, int]]:
        reshards: dict[int, tuple[ReshardCost, int]] = {}
        seen: set[tuple[object, ...]] = set()
        for i, (job, block, e) in enumerate(zip(self.calls, blocks, candidates, strict=True)):
            train = self.problem.train_index.get(job.model)
            key = (job.model, block, e.strategy.degrees)
            if train is None or job.kind == "train" or e.on_trained_params or key in seen:
                continue
            seen.add(key)
            cost = cost_of(train, blocks[train], candidates[train], i, block, e)
            if cost.has_copy:
                reshards[i] = cost, train
        return reshards

    def _planned_cost(self, _: int, src: Block, trained: Candidate, c: int, dst: Block, e: Candidate) -> ReshardCost:
        return self.reshard_costs.cost(self.calls[c].model, src, trained.strategy, dst, e.strategy)

    # ---------------------------------------------------------------------------------------- evaluation

    def evaluate(self, a: Assignment) -> Evaluation:
        candidates = self.resolve_copies(a.blocks, a.candidates)
        reshards = self.reshards_of_copies(a.blocks, candidates)
        seconds = self._seconds_with_bound(a.blocks, candidates, reshards)
        bytes_with_copies = self.bytes(a.blocks, candidates, reshards, keeps_copies=True)
        keeps_copies = self.fits(bytes_with_copies)
        bytes = bytes_with_copies if keeps_copies else self.bytes(a.blocks, candidates, reshards)
        return Evaluation(Assignment(a.blocks, candidates), seconds, bytes, keeps_copies)

    def _seconds_with_bound(self, blocks: Sequence[Block], candidates: Sequence[Candidate],
                            reshards: Mapping[int, tuple[ReshardCost, int]]) -> float:
        """Seconds of a step. Three simulated steps may be too few to show a chain that spans several steps; the bound
        covers it."""
        bound = self.bound.step_seconds(dict(enumerate(blocks)), {c: e.seconds for c, e in enumerate(candidates)})
        return max(self.seconds(blocks, candidates, reshards), bound)

    def seconds(self, blocks: Sequence[Block], candidates: Sequence[Candidate],
                reshards: Mapping[int, tuple[ReshardCost, int]]) -> float:
        """Seconds of a step."""
        numbers = [j.number for j in self.calls]
        seconds, sync_ranks = [0.0] * len(self.problem.jobs), [0] * len(self.problem.jobs)
        for n, e in zip(numbers, candidates, strict=True):
            seconds[n], sync_ranks[n] = e.seconds, 0 if e.sync_ranks == e.size else e.sync_ranks
        return step_seconds(self.problem, self.schedule(blocks), seconds, sync_ranks,
                            {numbers[i]: (_after_onload(cost, candidates[train]), numbers[train])
                             for i, (cost, train) in reshards.items()},
                            self._onloads(blocks, candidates))

    def _onloads(self, blocks: Sequence[Block], candidates: Sequence[Candidate]) -> dict[int, float]:
        """A job -> seconds of its onload; none if the call before it on its ranks leaves the copy there
        (`passes/offloads.py`)."""
        found: dict[int, float] = {}
        if not any(e.onload_seconds for e in candidates):
            return found
        s = self.schedule(blocks)
        held: dict[int, tuple[object, ...]] = {}  # atom -> the copy that the last call on it used
        for n in s.jobs:
            if (i := self.problem.call_index.get(n)) is None:
                continue
            copy = (self.calls[i].model, blocks[i], candidates[i].strategy.degrees)
            if candidates[i].onload_seconds and any(held.get(a) != copy for a in s.job_atoms[n]):
                found[n] = candidates[i].onload_seconds
            held |= dict.fromkeys(s.job_atoms[n], copy)
        return found

    def bytes(self, blocks: Sequence[Block], candidates: Sequence[Candidate],
              reshards: Mapping[int, tuple[ReshardCost, int]], keeps_copies: bool = False) -> int:
        """Peak bytes of the fullest atom: what it always holds, plus for each call what it needs and the copies that
        are used again later in the step. keeps_copies: copies stay to the end of the step."""
        return self._peak(blocks, candidates, reshards, keeps_copies)[0]

    def _peak(self, blocks: Sequence[Block], candidates: Sequence[Candidate],
              reshards: Mapping[int, tuple[ReshardCost, int]], keeps_copies: bool = False) -> tuple[int, int]:
        """(the bytes of `bytes`, the call that runs then)."""
        s = self.schedule(blocks)
        order = [self.problem.call_index[n] for n in s.jobs if n in self.problem.call_index]
        atoms_of = [s.job_atoms[j.number] for j in self.calls]
        last_use: dict[tuple[object, ...], tuple[int, int, int]] = {}  # copy -> (position, bytes, a call that uses it)
        for at, i in enumerate(order):
            if candidates[i].copy_bytes and (i in reshards or self._shares_copy(i, blocks, candidates, reshards)):
                buffers = reshards[i][0].buffer_bytes if i in reshards else 0
                last_use[self.calls[i].model, blocks[i], candidates[i].strategy.degrees] = \
                    len(order) if keeps_copies else at, candidates[i].copy_bytes + buffers, i
        peak = 0, 0
        for a in range(len(s.atoms)):
            here = [i for i in order if a in atoms_of[i]]
            shared: dict[tuple[object, ...], int] = defaultdict(int)
            for i in here:
                key = self.sharing_key(i, blocks[i], candidates[i])
                shared[key] = max(shared[key], candidates[i].shared_bytes)
            static = sum(shared.values()) + sum(candidates[i].static_bytes for i in here)
            copies = [(at, size) for at, size, i in last_use.values() if a in atoms_of[i]]
            for at, i in enumerate(order):
                if a in atoms_of[i]:
                    alive = sum(size for end, size in copies if end >= at)
                    peak = max(peak, (static + candidates[i].active_bytes + alive, i))
        return peak

    def estimate_peak(self, blocks: Sequence[Block], candidates: Sequence[Candidate]) -> tuple[int, int]:
        """(peak bytes, the call that runs then), as if every copy came over the network, without planning its
        routes."""
        resolved = self.resolve_copies(blocks, candidates)
        reshards = {i: (ReshardCost(buffer_bytes=BUCKET // 2), self.problem.train_index[self.calls[i].model])
                    for i, e in enumerate(resolved) if e.copy_bytes}
        return self._peak(blocks, resolved, reshards)

    def sharing_key(self, i: int, block: Block, e: Candidate) -> tuple[object, ...]:
        """Equal for calls that hold the same slices of a directory, or of a model that `sync` or `ema` writes. Where
        only tensor parallelism divides a model, a rank has the same slice on every block."""
        model, s = self.problem.models[self.calls[i].model], e.strategy
        what = (model.name,) if model.updated_from and not model.base else (model.path, model.head_name, model.dtype)
        where = (block,) if s.pp > 1 or s.ep > 1 else (block.start % s.tp,)
        return *what, *where, s.tp, s.pp, s.ep, s.backend

    def _shares_copy(self, i: int, blocks: Sequence[Block], candidates: Sequence[Candidate],
                     reshards: Mapping[int, tuple[ReshardCost, int]]) -> bool:
        """Whether the copy that a call uses is that of an earlier call."""
        mine = (self.calls[i].model, blocks[i], candidates[i].strategy.degrees)
        return any((self.calls[k].model, blocks[k], candidates[k].strategy.degrees) == mine for k in reshards)

    def fits(self, bytes: int) -> bool:
        return self.table.fits(bytes)


def _after_onload(cost: ReshardCost, trained: Candidate) -> ReshardCost:
    """The cost of a reshard whose parameters come from host memory first, where the training offloads them."""
    if not trained.sending_onload_seconds or not cost.has_copy:
        return cost
    return replace(cost, transfer_seconds=cost.transfer_seconds + trained.sending_onload_seconds)
