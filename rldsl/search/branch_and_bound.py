"""The best assignment, and a proof of how good it is: branch and bound, best bound first.

In: an evaluator. Out: a `Result`. First every call gets a block, the calls with most work first, then every call a
candidate. A subspace is left for later when its bound shows that nothing in it is better by more than the gap. Where
that takes many search nodes, the search begins again with bounds that also count reshards, and take longer. The result
depends on nothing but the evaluator and the number of search nodes explored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from math import inf

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Assignment, Evaluation, Evaluator
from rldsl.search.greedy import choose_candidates, greedy_evaluation
from rldsl.search.lower_bound import Moving
from rldsl.search.remaining_memory import Remaining, RemainingMemory
from rldsl.search.reshard_costs import ReshardCost
from rldsl.search.space import Block, Strategy

GAP = 0.01  # relative gap at which the search ends, by default
MAX_ORDERED = 1 << 14  # cached orders of candidates; the cache is emptied when it is full
MAX_OPTIMISTIC = 1 << 14  # cached candidates that stand for the fastest one of a call
MAX_NODES = 20_000  # search nodes explored, by default
NUM_NODES, WIDE_GAP = 2_000, 0.02  # after NUM_NODES search nodes, a search ends at WIDE_GAP, too
NUM_KEPT = 16  # best evaluations kept
DIVE_EVERY = 64  # search nodes after which the most promising blocks that wait get an assignment, whatever comes first
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


FREE = ReshardCost()  # of a reshard that takes no time, as far as is known
Blocks = tuple[Block, ...]
Candidates = tuple[Candidate, ...]
ShouldContinue = Callable[["Result"], bool]


@dataclass(frozen=True, slots=True)
class SearchNode:
    """A subspace: the first calls, in the order of the search, on `blocks`; once all calls have a block, the first
    calls with `candidates`, and the next call with the `num_skipped`-th of its `ordered_candidates` or a later one."""

    blocks: Blocks = ()  # of the first calls
    candidates: Candidates = ()  # of the first calls, once all calls have a block
    num_skipped: int = 0  # candidates of the next call that other nodes have
    remaining: tuple[Remaining, ...] = ()  # `remaining_bytes` of these blocks and candidates, once they are known
    quick_bound: bool = False  # its bound is that of `LowerBound`, to be replaced by a tighter one when it is popped


def branch_and_bound(evaluator: Evaluator, gap: float = GAP, max_nodes: int = MAX_NODES,
                     should_continue: ShouldContinue = lambda _: True) -> Result:
    """gap: 0 for the optimum. should_continue: called at every search node; false ends the search."""
    return BranchAndBound(evaluator, gap, max_nodes, should_continue).run()


class BranchAndBound:
    """A search that can continue where it ended. Calls are named by their index in `evaluator.calls`."""

    def __init__(self, evaluator: Evaluator, gap: float, max_nodes: int, should_continue: ShouldContinue,
                 reshards_after: int = NUM_NODES):
        """reshards_after: search nodes after which bounds count reshards."""
        self.reshards_after = reshards_after
        self.evaluator, self.gap, self.max_nodes, self.should_continue = evaluator, gap, max_nodes, should_continue
        self.calls, self.table, self.bound = evaluator.calls, evaluator.table, evaluator.bound
        self.memory = RemainingMemory(evaluator)
        self.best: list[Evaluation] = []
        self.wanted_bound: float | None = None  # the search ends when it is proved, whatever the gap
        self.counts_reshards = False  # whether bounds count what moves, which takes longer; and whether it dives
        self.proved_bound = 0.0  # by what was explored before bounds did
        self.pruned_bound = inf  # the smallest bound of a subspace that was left within the gap
        self.num_nodes = 0  # explored so far
        self.heap: list[tuple[float, int, int, SearchNode]] = []  # bound, minus the decisions made, serial number, node
        self.number = 0
        self._ordered: dict[tuple[object, ...], tuple[Candidate, ...]] = {}  # a cache
        self.assigned: set[Blocks] = set()  # blocks of all calls that `assign_greedily` has looked at
        self.promising: list[tuple[float, int, Blocks]] = []  # bound, serial number, blocks of all calls; to dive into
        self.train_index = evaluator.problem.train_index
        order = sorted(range(len(self.calls)), key=lambda c: (-self._work(c), c))
        self.order = [c for c in order if not self._is_tied(c)]

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
        return self.explore()

    def prove(self, bound: float) -> Result:
        """Continues until no assignment takes less than `bound` seconds, or less than the best one that was found. For
        a bound that the accepted gap did not ask for."""
        self.wanted_bound, self.pruned_bound = bound, inf
        if not self.counts_reshards:
            self.count_reshards()
        return self.explore()

    def count_reshards(self) -> None:
        """Begins again, with bounds that count what moves between a training and the calls that use its model."""
        self.proved_bound = self.result(False).bound
        self.counts_reshards, self.pruned_bound = True, inf
        self.heap.clear()
        self.push(self.bound.step_seconds({}), SearchNode())

    def explore(self) -> Result:
        complete = True
        while self.heap and self.heap[0][0] < self.cutoff():
            if self.is_spent():
                complete = False
                break
            if self.num_nodes >= self.reshards_after and not self.counts_reshards:
                self.count_reshards()
                continue
            bound, _, _, node = heappop(self.heap)
            if node.quick_bound:
                self.push_with_blocks(bound, node.blocks)
                continue
            self.num_nodes += 1
            if self.counts_reshards and not self.num_nodes % DIVE_EVERY:
                self.dive()
                if self.num_nodes & (self.num_nodes - 1) == 0:
                    self.improve()
            if len(node.blocks) < len(self.order):
                self.branch_on_block(node)
            else:
                self.branch_on_candidate(node, bound)
        self.improve()
        if len(self.best) == 1:
            self.add_neighbors(self.best[0].assignment)
        return self.result(complete)

    def is_spent(self) -> bool:
        """Whether the search ends before it has reached its gap."""
        now, wide = self.result(False), self.num_nodes >= NUM_NODES and self.wanted_bound is None
        return (self.num_nodes >= self.max_nodes or wide and now.gap <= WIDE_GAP
                or bool(self.best) and not self.should_continue(now))

    def dive(self) -> None:
        """An assignment on the blocks with the smallest bound that have none yet. Where many bounds are equal, the
        search comes to an assignment late, and without a good one it prunes nothing."""
        while self.promising:
            bound, _, blocks = heappop(self.promising)
            if bound >= self.cutoff():
                self.promising.clear()
            elif self.assign_greedily(blocks):
                break

    def assign_greedily(self, blocks: Blocks) -> bool:
        """Whether these blocks of all calls had no assignment yet; they have one now, if any fits."""
        if blocks in self.assigned:
            return False
        self.assigned.add(blocks)
        greedy = choose_candidates(self.evaluator, self.blocks_in_program_order(blocks))
        if greedy is not None:
            self.record(greedy)
        return True

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
        """Where the greedy assignment is the only one that was evaluated: some that differ from it in one call."""
        for c, job in enumerate(self.calls):
            others = (e for e in self.table.candidates(job, a.blocks[c].size) if e.strategy != a.candidates[c].strategy)
            for e in islice(others, NUM_NEIGHBORS):
                candidates = self.evaluator.with_candidate(a.candidates, c, e)
                if candidates is None:
                    continue
                evaluation = self.evaluator.evaluate(Assignment(a.blocks, candidates))
                if self.evaluator.fits(evaluation.bytes):
                    self.record(evaluation)

    def result(self, complete: bool) -> Result:
        best = self.best[0].seconds if self.best else inf
        open_bound = self.heap[0][0] if self.heap else inf
        bound = max(self.proved_bound, min(best, self.pruned_bound, open_bound))
        return Result(tuple(self.best), bound, self.num_nodes, complete)

    def cutoff(self) -> float:
        """A subspace with this bound or a larger one is left for later."""
        if not self.best:
            return inf
        best = self.best[0].seconds
        return best / (1 + self.gap) if self.wanted_bound is None else min(self.wanted_bound, best)

    def push(self, bound: float, node: SearchNode) -> None:
        if bound == inf or self.best and bound >= self.best[0].seconds:
            return
        if bound >= self.cutoff():
            self.pruned_bound = min(self.pruned_bound, bound)
        self.number += 1
        heappush(self.heap, (bound, -len(node.blocks) - len(node.candidates), self.number, node))

    def record(self, found: Evaluation) -> None:
        if all(found.assignment != other.assignment for other in self.best):
            self.best = sorted([*self.best, found], key=_rank)[:NUM_KEPT]

    # ------------------------------------------------------------------------------------------ branching

    def branch_on_block(self, node: SearchNode) -> None:
        """The next call on every block, up to symmetry."""
        c, limit = self.order[len(node.blocks)], self.best[0].seconds if self.best else inf
        placed, tied = self.blocks_by_call(node.blocks), self.evaluator.tied_calls(c)
        moving = Moving() if self.counts_reshards else None
        for b in self.evaluator.problem.blocks(self.calls[c], node.blocks):
            # most blocks are too slow, so that the memory of few is worked out
            blocks, by_call = (*node.blocks, b), placed | dict.fromkeys(tied, b)
            bound = self.bound.step_seconds(by_call, moving=moving, limit=limit)
            if bound < limit and self.evaluator.fits(self.bound.peak_bytes(by_call, b)):
                self.push(bound, SearchNode(blocks, quick_bound=len(blocks) == len(self.order)))

    def branch_on_candidate(self, node: SearchNode, bound: float) -> None:
        """Two subspaces: the next call with the first candidate that is left, and with a later one."""
        blocks, candidates = node.blocks, node.candidates
        if self.counts_reshards and self.plan_reshards(blocks, candidates):
            bound = max(bound, self.relaxed_seconds(blocks, candidates, node.remaining, node.num_skipped))
            if bound > self.heap_bound():
                self.push(bound, node)
                return
        if not candidates and not node.num_skipped:
            self.assign_greedily(blocks)
        option, has_others = self.next_candidate(blocks, candidates, node.num_skipped, node.remaining)
        if has_others:
            skipped = node.num_skipped + 1
            self.push(max(bound, self.relaxed_seconds(blocks, candidates, node.remaining, skipped)),
                      SearchNode(blocks, candidates, skipped, node.remaining))
        chosen = (*candidates, option)
        remaining = self.memory.remaining_bytes(self.blocks_in_program_order(blocks), self.chosen_by_call(chosen))
        bound = max(bound, self.relaxed_seconds(blocks, chosen, remaining))
        if len(chosen) < len(self.order) or bound >= self.cutoff():
            self.push(bound, SearchNode(blocks, chosen, 0, remaining))
            return
        for assignment in self.complete_assignments(blocks, chosen):
            evaluation = self.evaluator.evaluate(assignment)
            if self.evaluator.fits(evaluation.bytes):
                self.record(evaluation)

    def heap_bound(self) -> float:
        """The smallest bound of a subspace that waits."""
        return self.heap[0][0] if self.heap else inf

    def plan_reshards(self, blocks: Blocks, candidates: Candidates) -> bool:
        """Plans the routes of what moves between the chosen calls, so that its cost replaces the bound on it.
        Whether there was anything to plan."""
        chosen, every, new = self.chosen_by_call(candidates), self.blocks_in_program_order(blocks), False
        for c, e in chosen.items():
            train = self.train_index.get(self.calls[c].model)
            if train is None or self.calls[c].kind == "train" or train not in chosen or (
                    every[c], e.strategy.degrees) == (every[train], chosen[train].strategy.degrees):
                continue
            costs, key = self.evaluator.reshard_costs, (self.calls[c].model, every[train], chosen[train].strategy,
                                                        every[c], e.strategy)
            if costs.cached(*key) is None:
                costs.cost(*key)
                new = True
        return new

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
            self.push(bound, SearchNode(blocks, quick_bound=True))
            return
        remaining = self.memory.remaining_bytes(every, {})
        bound = max(bound, self.relaxed_seconds(blocks, (), remaining))
        self.push(bound, SearchNode(blocks, remaining=remaining))
        if self.counts_reshards and bound < self.cutoff():
            heappush(self.promising, (bound, self.number, blocks))

    def relaxed_seconds(self, blocks: Blocks, candidates: Candidates, remaining: Sequence[Remaining],
                        num_skipped: int = 0) -> float:
        """A lower bound on the seconds of a step with all blocks placed and some candidates chosen: the other calls
        take their fastest candidate that fits next to the least memory of all others (the next call without its first
        `num_skipped`), and reshards that still depend on a choice take no time or, where bounds count them, as
        little as any choice allows."""
        chosen, every = self.chosen_by_call(candidates), self.blocks_in_program_order(blocks)
        optimistic = []
        next_call = self.order[len(candidates)] if len(candidates) < len(self.order) else -1
        pairs: dict[tuple[int, int], float] = {}
        for c, job in enumerate(self.calls):
            if c in chosen:
                optimistic.append(chosen[c])
                continue
            fitting = self.fitting_candidates(c, every, chosen, remaining[c])
            if c != next_call:
                seconds = min([e.seconds for e in fitting], default=inf) if self.pair_of(c, chosen) else next(
                    (e.seconds for e in fitting), inf)
            else:
                left = list(islice(fitting, num_skipped, None))
                seconds = min([e.seconds for e in left], default=inf)
                if left and (pair := self.pair_of(c, chosen)) is not None:
                    pairs[pair] = self.seconds_of_pair(pair, every, {**chosen, c: left[0]})
            if seconds == inf:
                return inf
            optimistic.append(_optimistic_candidate(seconds, job.kind, every[c].size))
        found = self.evaluator.seconds(every, optimistic, self.optimistic_reshards(every, chosen))
        if not self.counts_reshards:
            return found
        known = {c: e.seconds for c, e in enumerate(optimistic)}
        return max(found, self.bound.step_seconds(dict(enumerate(every)), known, Moving(chosen, pairs)))

    def next_candidate(self, blocks: Blocks, candidates: Candidates, num_skipped: int,
                       remaining: Sequence[Remaining]) -> tuple[Candidate, bool]:
        """(the candidate that the next call gets, whether others are left)."""
        chosen, every = self.chosen_by_call(candidates), self.blocks_in_program_order(blocks)
        c = self.order[len(candidates)]
        fitting = self.fitting_candidates(c, every, chosen, remaining[c])
        first, *others = islice(fitting, num_skipped, num_skipped + 2)
        return first, bool(others)

    def pair_of(self, c: int, chosen: Mapping[int, Candidate]) -> tuple[int, int] | None:
        """(a call that uses a copy, the training that it comes from), of which `c` is one and the other is chosen,
        where bounds count what moves between them."""
        if not self.counts_reshards:
            return None
        train = self.train_index.get(self.calls[c].model)
        if self.calls[c].kind != "train":
            return (c, train) if train is not None and train in chosen else None
        return next(((k, c) for k in chosen if self.calls[k].model == self.calls[c].model), None)

    def seconds_of_pair(self, pair: tuple[int, int], every: Blocks, chosen: Mapping[int, Candidate]) -> float:
        """The least seconds of two calls of `pair_of`, which are chosen, and the reshard between them."""
        first, train = pair
        return self.evaluator.reshard_bounds.seconds(train, every[train], chosen[train], first, every[first],
                                                     chosen[first])

    def ordered_candidates(self, c: int, every: Blocks, chosen: Mapping[int, Candidate]) -> tuple[Candidate, ...]:
        """Of a call, the fastest first; where what moves to or from a chosen call depends on it, with what moves."""
        candidates, pair = self.table.candidates(self.calls[c], every[c].size), self.pair_of(c, chosen)
        if pair is None:
            return candidates
        other = chosen[pair[0] if pair[1] == c else pair[1]]
        key = pair, c, other.strategy, every[pair[0]], every[pair[1]]
        if key not in self._ordered:
            if len(self._ordered) >= MAX_ORDERED:
                self._ordered.clear()
            self._ordered[key] = tuple(sorted(candidates, key=lambda e: self.seconds_of_pair(
                pair, every, {**chosen, c: e})))
        return self._ordered[key]

    def fitting_candidates(self, c: int, every: Blocks, chosen: Mapping[int, Candidate],
                           remaining: Remaining) -> Iterator[Candidate]:
        """The `ordered_candidates` of a call that leave the others their least memory."""
        candidates = self.ordered_candidates(c, every, chosen)
        if not self.table.memory:
            return iter(candidates)
        resting, waiting, running = remaining

        def fits(e: Candidate) -> bool:
            held = e.static_bytes + e.shared_bytes
            if held > resting or held + e.active_bytes > running:
                return False
            if not e.copy_bytes or held + e.copy_bytes <= waiting and held + e.active_bytes + e.copy_bytes <= running:
                return True
            return not self.memory.needs_copy(c, e, every, chosen)

        return filter(fits, candidates)

    def optimistic_reshards(self, every: Blocks,
                            chosen: Mapping[int, Candidate]) -> dict[int, tuple[ReshardCost, int]]:
        """A lower bound on the reshards of copies. A call that may use the copy of an earlier call that is not chosen
        counts without one; of the others, what is not chosen counts with what needs the least. A copy on other ranks
        than its model's training waits for the training in any case."""
        reshards, seen = {}, set[tuple[object, ...]]()
        undecided: set[tuple[str, Block]] = set()  # where a call without a candidate may use a copy
        for c, job in enumerate(self.calls):
            train = self.train_index.get(job.model)
            if train is None or job.kind == "train":
                continue
            where, e, trained = (job.model, every[c]), chosen.get(c), chosen.get(train)
            cost = FREE
            if where not in undecided and (self.counts_reshards or e is not None and trained is not None):
                key = (*where, e.strategy.degrees) if e is not None else where
                own = every[c] == every[train] and e is not None and trained is not None and \
                    e.strategy.degrees == trained.strategy.degrees
                if not own and key not in seen and (e is not None or not any(k[:2] == where for k in seen)):
                    cost = self.evaluator.reshard_bounds.min_cost(train, every[train], trained, c, every[c], e)
                seen.add(key)
            if e is None:
                undecided.add(where)
            if cost.received_bytes or every[c] != every[train]:
                reshards[c] = cost, train
        return reshards

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


def _rank(found: Evaluation) -> tuple[float, int, int]:
    """The order of what was found: where other work hides an onload completely, what offloads less comes first."""
    return found.seconds, sum(e.strategy.offload for e in found.assignment.candidates), found.bytes


@lru_cache(maxsize=MAX_OPTIMISTIC)
def _optimistic_candidate(seconds: float, kind: str, size: int) -> Candidate:
    """A candidate whose ranks wait for each other as little as those of its call ever do."""
    return Candidate(Strategy(), size, seconds, size if kind == "train" else 1, 0, 0, 0, 0)
