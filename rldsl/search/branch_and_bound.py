"""The best assignment, and a proof of how good it is: branch and bound, best bound first.

In: an evaluator. Out: a `Result`. First every call gets a block, the calls with most work first, then every call a
candidate. A subspace is pruned when its bound shows that nothing in it is better by more than the gap. The result
depends on nothing but the evaluator and the number of search nodes explored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from math import inf

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.greedy import choose_candidates, greedy_evaluation
from rldsl.search.remaining_bytes import LeastBytes, Remaining, StepMemory
from rldsl.search.reshard_costs import ReshardCost
from rldsl.search.space import Block, Strategy

GAP = 0.01  # relative gap at which the search ends, by default
MAX_NODES = 20_000  # search nodes explored, by default
NUM_NODES, WIDE_GAP = 2_000, 0.02  # after NUM_NODES search nodes, a search ends at WIDE_GAP, too
NUM_KEPT = 16  # best evaluations kept
NUM_NEIGHBORS = 3  # other strategies tried per call


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found, so far or at its end."""

    best: tuple[Evaluation, ...]  # different assignments, the fastest first; empty where nothing fits
    bound: float  # seconds that no assignment of the space is faster than
    num_nodes: int  # search nodes explored
    complete: bool  # whether the gap was reached or the space exhausted

    @property
    def gap(self) -> float:
        return self.best[0].seconds / self.bound - 1 if self.best and self.bound else inf


Blocks = tuple[Block, ...]
Candidates = tuple[Candidate, ...]
ShouldContinue = Callable[["Result"], bool]


@dataclass(frozen=True, slots=True)
class SearchNode:
    """A subspace: the first calls, in the order of the search, on `blocks`; once all calls have a block, the first
    calls with `candidates`, and the next call with its `num_skipped`-th fastest candidate or a slower one."""

    blocks: Blocks = ()  # of the first calls
    candidates: Candidates = ()  # of the first calls, once all calls have a block
    num_skipped: int = 0  # faster candidates of the next call that other nodes have
    remaining: tuple[Remaining, ...] = ()  # `remaining_bytes` of these blocks and candidates, once they are known
    quick_bound: bool = False  # its bound is that of `LowerBound`, to be replaced by a tighter one when it is popped


def branch_and_bound(evaluator: Evaluator, gap: float = GAP, max_nodes: int = MAX_NODES,
                     should_continue: ShouldContinue = lambda _: True) -> Result:
    """gap: 0 for the optimum. should_continue: called at every search node; false ends the search."""
    return _BranchAndBound(evaluator, gap, max_nodes, should_continue).run()


class _BranchAndBound:
    """Calls are named by their index in `evaluator.calls`."""

    def __init__(self, evaluator: Evaluator, gap: float, max_nodes: int, should_continue: ShouldContinue):
        self.evaluator, self.gap, self.max_nodes, self.should_continue = evaluator, gap, max_nodes, should_continue
        self.calls, self.table, self.bound = evaluator.calls, evaluator.table, evaluator.bound
        self.best: list[Evaluation] = []
        self.pruned_bound = inf  # the smallest bound of a subspace that was pruned within the gap
        self.heap: list[tuple[float, int, int, SearchNode]] = []  # bound, minus the decisions made, serial number, node
        self.number = 0
        self._divisions: dict[tuple[int, int], frozenset[tuple[object, ...]]] = {}  # a cache
        self.train_index = evaluator.problem.train_index
        order = sorted(range(len(self.calls)), key=lambda c: (-self._work(c), c))
        self.order = [c for c in order if not self._is_tied(c)]
        self.paths = [evaluator.problem.models[j.model].path for j in self.calls]

    def _work(self, c: int) -> float:
        work = self.bound.min_work[c]
        return work if work < inf else 0.0

    def _is_tied(self, c: int) -> bool:
        """Whether a call is a further training of its model, which has the block and layout of the first one."""
        job = self.calls[c]
        return job.kind == "train" and self.train_index[job.model] != c

    def run(self) -> Result:
        start = greedy_evaluation(self.evaluator)
        if start is not None:
            self.record(start)
        self.push(self.bound.step_seconds({}), SearchNode())
        num_nodes, complete = 0, True
        while self.heap and self.heap[0][0] < self.cutoff():
            if self.is_spent(num_nodes):
                complete = False
                break
            bound, _, _, node = heappop(self.heap)
            if node.quick_bound:
                self.push_with_blocks(bound, node.blocks)
                continue
            num_nodes += 1
            if len(node.blocks) < len(self.order):
                self.branch_on_block(node)
            else:
                self.branch_on_candidate(node, bound)
        self.improve()
        if len(self.best) == 1:
            self.add_neighbors(self.best[0].assignment)
        return self.result(num_nodes, complete)

    def is_spent(self, num_nodes: int) -> bool:
        """Whether the search ends before it has reached its gap."""
        now = self.result(num_nodes, False)
        return (num_nodes >= self.max_nodes or num_nodes >= NUM_NODES and now.gap <= WIDE_GAP
                or bool(self.best) and not self.should_continue(now))

    def improve(self) -> None:
        """Hill climbing: another layout of one call while that makes the best faster. A search that ends at the
        accepted gap must not leave out what its own report lists."""
        while self.best:
            now = self.best[0]
            faster = self.evaluator.fastest_neighbor(self.evaluator.free_neighbors(now.assignment), now.seconds)
            if faster is None:
                break
            self.record(faster[1])

    def add_neighbors(self, a: Assignment) -> None:
        """Where the greedy assignment was the best: the assignments that differ from it in one call."""
        for c, job in enumerate(self.calls):
            others = (e for e in self.table.candidates(job, a.blocks[c].size) if e.strategy != a.candidates[c].strategy)
            for e in islice(others, NUM_NEIGHBORS):
                candidates = self.evaluator.with_candidate(a.candidates, c, e)
                if candidates is None:
                    continue
                evaluation = self.evaluator.evaluate(Assignment(a.blocks, candidates))
                if self.evaluator.fits(evaluation.bytes):
                    self.record(evaluation)

    def result(self, num_nodes: int, complete: bool) -> Result:
        best = self.best[0].seconds if self.best else inf
        open_bound = self.heap[0][0] if self.heap else inf
        return Result(tuple(self.best), min(best, self.pruned_bound, open_bound), num_nodes, complete)

    def cutoff(self) -> float:
        """A subspace with this bound or a larger one is pruned."""
        return self.best[0].seconds / (1 + self.gap) if self.best else inf

    def push(self, bound: float, node: SearchNode) -> None:
        if bound == inf:
            return
        if bound >= self.cutoff():
            self.pruned_bound = min(self.pruned_bound, bound)
            return
        self.number += 1
        heappush(self.heap, (bound, -len(node.blocks) - len(node.candidates), self.number, node))

    def record(self, found: Evaluation) -> None:
        if all(found.assignment != other.assignment for other in self.best):
            self.best = sorted([*self.best, found], key=lambda j: (j.seconds, j.bytes))[:NUM_KEPT]

    # ------------------------------------------------------------------------------------------ branching

    def branch_on_block(self, node: SearchNode) -> None:
        """The next call on every block, up to symmetry."""
        c = self.order[len(node.blocks)]
        placed, tied = self.blocks_by_call(node.blocks), self.evaluator.tied_calls(c)
        for b in self.evaluator.problem.blocks(self.calls[c], node.blocks):
            blocks, by_call = (*node.blocks, b), placed | dict.fromkeys(tied, b)
            if not self.evaluator.fits(self.bound.peak_bytes(by_call, b)):
                continue
            self.push(self.bound.step_seconds(by_call), SearchNode(blocks, quick_bound=len(blocks) == len(self.order)))

    def branch_on_candidate(self, node: SearchNode, bound: float) -> None:
        """Two subspaces: the next call with its fastest candidate that is left, and with a slower one."""
        blocks, candidates = node.blocks, node.candidates
        if not candidates and not node.num_skipped:
            greedy = choose_candidates(self.evaluator, self.blocks_in_program_order(blocks))
            if greedy is not None:
                self.record(greedy)
        option, has_slower = self.next_candidate(blocks, candidates, node.num_skipped, node.remaining)
        if has_slower:
            skipped = node.num_skipped + 1
            self.push(max(bound, self.relaxed_seconds(blocks, candidates, node.remaining, skipped)),
                      SearchNode(blocks, candidates, skipped, node.remaining))
        chosen = (*candidates, option)
        remaining = self.remaining_bytes(self.blocks_in_program_order(blocks), self.chosen_by_call(chosen))
        bound = max(bound, self.relaxed_seconds(blocks, chosen, remaining))
        if len(chosen) < len(self.order) or bound >= self.cutoff():
            self.push(bound, SearchNode(blocks, chosen, 0, remaining))
            return
        for assignment in self.complete_assignments(blocks, chosen):
            evaluation = self.evaluator.evaluate(assignment)
            if self.evaluator.fits(evaluation.bytes):
                self.record(evaluation)

    def blocks_by_call(self, blocks: Blocks) -> dict[int, Block]:
        """Call -> block of the calls placed so far, tied calls included."""
        by_call = dict(zip(self.order, blocks, strict=False))
        for c, job in enumerate(self.calls):
            if self._is_tied(c) and self.train_index[job.model] in by_call:
                by_call[c] = by_call[self.train_index[job.model]]
        return by_call

    def blocks_in_program_order(self, blocks: Blocks) -> Blocks:
        """The blocks of all calls; `blocks` must place all of them."""
        by_call = self.blocks_by_call(blocks)
        return tuple(by_call[c] for c in range(len(self.calls)))

    def chosen_by_call(self, candidates: Candidates) -> dict[int, Candidate]:
        """Call -> its candidate, of the calls that have one."""
        return dict(zip(self.order, candidates, strict=False))

    def push_with_blocks(self, quick_bound: float, blocks: Blocks) -> None:
        """The subspace of these blocks of all calls, with the tighter bound. Where already the fastest candidates of
        all calls are too slow, what fits next to each other is not worked out."""
        every = self.blocks_in_program_order(blocks)
        fastest = [_optimistic_candidate(self.bound.call_seconds(c, b.size), job.kind, b.size)
                   for c, (job, b) in enumerate(zip(self.calls, every, strict=True))]
        bound = max(quick_bound, self.evaluator.seconds(every, fastest, self.optimistic_reshards(every, {})))
        if bound >= self.cutoff() and bound >= self.pruned_bound:
            return
        remaining = self.remaining_bytes(every, {})
        self.push(max(bound, self.relaxed_seconds(blocks, (), remaining)), SearchNode(blocks, remaining=remaining))

    def relaxed_seconds(self, blocks: Blocks, candidates: Candidates, remaining: Sequence[Remaining],
                        num_skipped: int = 0) -> float:
        """A lower bound with all blocks placed and some candidates chosen: the other calls take their fastest
        candidate that fits next to the least memory of all others (the next call without its first `num_skipped`), and
        reshards that still depend on a choice take no time."""
        chosen, every = self.chosen_by_call(candidates), self.blocks_in_program_order(blocks)
        optimistic = []
        next_call = self.order[len(candidates)] if len(candidates) < len(self.order) else -1
        for c, job in enumerate(self.calls):
            if c in chosen:
                optimistic.append(chosen[c])
                continue
            fitting = self.fitting_candidates(c, every, chosen, remaining[c])
            fastest = next(islice(fitting, num_skipped if c == next_call else 0, None), None)
            if fastest is None:
                return inf
            optimistic.append(_optimistic_candidate(fastest.seconds, job.kind, every[c].size))
        return self.evaluator.seconds(every, optimistic, self.optimistic_reshards(every, chosen))

    def next_candidate(self, blocks: Blocks, candidates: Candidates, num_skipped: int,
                       remaining: Sequence[Remaining]) -> tuple[Candidate, bool]:
        """(the candidate that the next call gets, whether it has slower ones)."""
        chosen, every = self.chosen_by_call(candidates), self.blocks_in_program_order(blocks)
        c = self.order[len(candidates)]
        fitting = self.fitting_candidates(c, every, chosen, remaining[c])
        first, *slower = islice(fitting, num_skipped, num_skipped + 2)
        return first, bool(slower)

    def fitting_candidates(self, c: int, every: Blocks, chosen: Mapping[int, Candidate],
                           remaining: Remaining) -> Iterator[Candidate]:
        """The candidates of a call that leave the others their least memory, the fastest first."""
        candidates = self.table.candidates(self.calls[c], every[c].size)
        if not self.table.memory:
            return iter(candidates)
        resting, waiting, running = remaining

        def fits(e: Candidate) -> bool:
            held = e.static_bytes + e.shared_bytes
            if held > resting or held + e.active_bytes > running:
                return False
            if not e.copy_bytes or held + e.copy_bytes <= waiting and held + e.active_bytes + e.copy_bytes <= running:
                return True
            return not self.needs_copy(c, e, every, chosen)

        return filter(fits, candidates)

    def needs_copy(self, c: int, e: Candidate, every: Blocks, chosen: Mapping[int, Candidate]) -> bool:
        """Whether a call with this candidate certainly uses a copy of its model, which is alive while it runs: on other
        ranks than the training, or if the training, or any that it may get, divides the parameters differently
        (`reshard/alias.py`). A call that uses the trained parameters has the degrees of the training."""
        train = self.train_index.get(self.calls[c].model)
        if train is None or not e.copy_bytes:
            return False
        if every[c] != every[train]:
            return True
        return _division(e.strategy) not in (self.train_divisions(train, every[train].size) if train not in chosen
                                             else {_division(chosen[train].strategy)})

    def train_divisions(self, train: int, size: int) -> frozenset[tuple[object, ...]]:
        """How a training on `size` ranks may divide the parameters."""
        key = (train, size)
        if key not in self._divisions:
            self._divisions[key] = frozenset(_division(e.strategy)
                                             for e in self.table.candidates(self.calls[train], size))
        return self._divisions[key]

    def optimistic_reshards(self, every: Blocks,
                            chosen: Mapping[int, Candidate]) -> dict[int, tuple[ReshardCost, int]]:
        """A lower bound on the reshards of copies: their least cost where all calls that may share the copy are chosen,
        else no time. A copy on other ranks than its model's training waits for the training in any case."""
        reshards, seen = {}, set[tuple[object, ...]]()
        for c, job in enumerate(self.calls):
            train = self.train_index.get(job.model)
            if train is None or job.kind == "train":
                continue
            cost = ReshardCost()
            if train in chosen and all(k in chosen for k, o in enumerate(self.calls) if (
                    o.model, every[k]) == (job.model, every[c])):
                e = chosen[c]
                key = job.model, every[c], e.strategy.degrees
                own = every[c] == every[train] and e.strategy.degrees == chosen[train].strategy.degrees
                cost = ReshardCost() if key in seen or own else self.evaluator.min_reshard_cost(
                    train, every[train], chosen[train], c, every[c], e)
                seen.add(key)
            if cost.received_bytes or every[c] != every[train]:
                reshards[c] = cost, train
        return reshards

    def remaining_bytes(self, every: Blocks, chosen: Mapping[int, Candidate]) -> tuple[Remaining, ...]:
        """What all other calls leave to each call, when they take their least."""
        if not self.table.memory:
            return (Remaining(0, 0, 0),) * len(every)
        index = self.evaluator.problem.call_index
        position = {index[n]: at for at, n in enumerate(self.evaluator.schedule(every).jobs) if n in index}
        least = [self.least_bytes(c, every, chosen) for c in range(len(every))]
        return StepMemory(self.table.memory, [job.model for job in self.calls], self.paths, every, least,
                          position).remaining()

    def least_bytes(self, c: int, every: Blocks, chosen: Mapping[int, Candidate]) -> LeastBytes:
        e, train = chosen.get(c), self.train_index.get(self.calls[c].model)
        if e is not None:
            copy = e.copy_bytes if self.needs_copy(c, e, every, chosen) else 0
            return LeastBytes(e.static_bytes, e.shared_bytes, e.active_bytes, copy)
        moves = train is not None and self.bound.moves(c, every[c], every[train])
        return LeastBytes(*self.bound.call_bytes(c, every[c].size),
                          self.bound.least_copy_bytes(c, every[c].size) if moves else 0)

    def complete_assignments(self, blocks: Blocks, candidates: Candidates) -> Iterator[Assignment]:
        """Assignments of all calls: further trainings of a model with every candidate of the first one's layout."""
        chosen, every = dict(zip(self.order, candidates, strict=False)), self.blocks_in_program_order(blocks)

        def extend(c: int, out: Candidates) -> Iterator[Candidates]:
            if c == len(self.calls):
                yield out
            elif c in chosen:
                yield from extend(c + 1, (*out, chosen[c]))
            else:
                first = chosen[self.train_index[self.calls[c].model]]
                for e in self.table.candidates(self.calls[c], every[c].size):
                    if e.strategy.degrees == first.strategy.degrees:
                        yield from extend(c + 1, (*out, e))

        return (Assignment(every, out) for out in extend(0, ()))


def _division(s: Strategy) -> tuple[object, ...]:
    """Equal for strategies that may share parameters on the same ranks; `zero` is the last."""
    return s.tp, s.pp, s.vpp, s.ep, s.backend, min(s.zero, 1)


def _optimistic_candidate(seconds: float, kind: str, size: int) -> Candidate:
    """A candidate whose ranks wait for each other as little as those of its call ever do."""
    return Candidate(Strategy(), size, seconds, size if kind == "train" else 1, 0, 0, 0, 0)
