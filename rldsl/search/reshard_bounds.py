"""Lower bounds on the time of bringing a trained model to a call that uses a copy, without planning routes.

In: a problem, its candidates, the train call and the call that uses the copy, with their blocks. Out: a `ReshardCost`
that no pair of candidates is below, and the least seconds of both calls with what moves between them. That is often
more than the two fastest candidates take: on a slow network they divide the model so that it need not move much.
"""

from __future__ import annotations

from math import inf

from rldsl.memory.parameters import resting
from rldsl.search.call_costs import Candidate
from rldsl.search.candidates import CandidateTable
from rldsl.search.problem import Problem
from rldsl.search.reshard_costs import ReshardCost, ReshardCosts, canonical_blocks
from rldsl.search.space import Block


class ReshardBounds:
    """Calls are named by their index in `problem.calls`."""

    def __init__(self, problem: Problem, table: CandidateTable, costs: ReshardCosts):
        self.problem, self.calls, self.table, self.costs = problem, problem.calls, table, costs
        self._elements: dict[tuple[object, ...], int] = {}
        self._fastest: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}
        self._pairs: dict[tuple[object, ...], float] = {}

    def min_cost(self, train: int, src: Block, trained: Candidate | None, c: int, dst: Block,
                 e: Candidate | None) -> ReshardCost:
        """Of the reshard from the train call `train` on `src` to call `c` on `dst`. trained, e: None: of any candidate
        of that call."""
        if trained is not None and e is not None:
            cached = self.costs.cached(self.calls[c].model, src, trained.strategy, dst, e.strategy)
            if cached is not None:
                return cached
        need = self._max_resident_elements(c, e) if e is not None else min(
            [n for n, _ in self._fastest_by_elements(c, dst.size)], default=0)
        have = self._max_resident_elements(train, trained) if trained is not None else max(
            [n for n, _ in self._fastest_by_elements(train, src.size)], default=0)
        return self._cost(train, src, have, dst, need)

    def pair_seconds(self, train: int, src: Block, c: int, dst: Block, e: Candidate | None = None) -> float:
        """The least seconds of both calls and the reshard between them. e: the candidate of call `c`; None: any."""
        same = e and (e.seconds, e.strategy.degrees)
        key = train, c, same, *canonical_blocks(src, dst, self.problem.cluster.gpus)
        if key not in self._pairs:
            used = self._fastest_by_elements(c, dst.size) if e is None else (
                (self._max_resident_elements(c, e), e.seconds),)
            least = inf
            for need, seconds in used:
                for have, train_seconds in self._fastest_by_elements(train, src.size):
                    if seconds + train_seconds < least:
                        cost = self._cost(train, src, have, dst, need)
                        least = min(least, seconds + train_seconds + cost.transfer_seconds + cost.unpack_seconds)
            self._pairs[key] = least
        return self._pairs[key]

    def seconds(self, train: int, src: Block, trained: Candidate, c: int, dst: Block, e: Candidate) -> float:
        """The least seconds of both calls with these candidates and the reshard between them."""
        cost = self._cost(train, src, self._max_resident_elements(train, trained), dst,
                          self._max_resident_elements(c, e))
        return e.seconds + trained.seconds + cost.transfer_seconds + cost.unpack_seconds

    def _cost(self, train: int, src: Block, have: int, dst: Block, need: int) -> ReshardCost:
        """Where the fullest rank holds `have` elements after the training, and needs `need` for the call: it lacks at
        least the elements that exceed what any rank holds; and what the devices of a node do not hold together enters
        the node over the network, at best divided over all of its devices."""
        gpus = self.problem.cluster.gpus
        same_node = src.start // gpus <= (dst.stop - 1) // gpus and dst.start // gpus <= (src.stop - 1) // gpus
        local = gpus if same_node else 0
        return self.costs.lower_bound(self.calls[train].model, need - (have if src.overlaps(dst) else 0),
                                      (need - local * have) // gpus)

    def _max_resident_elements(self, c: int, e: Candidate) -> int:
        """Elements of its model that the fullest rank holds between calls."""
        key = self.calls[c].model, e.size, e.strategy.degrees
        if key not in self._elements:
            isolated = self.table.isolated_call(self.calls[c], e.strategy, e.size, self.calls[c].kind == "train")
            self._elements[key] = max(map(resting, isolated.fullest_stages))
        return self._elements[key]

    def _fastest_by_elements(self, c: int, size: int) -> tuple[tuple[int, float], ...]:
        """(elements that the fullest rank holds, seconds of the fastest candidate that holds them), of a call on `size`
        ranks."""
        key = c, size
        if key not in self._fastest:
            found: dict[int, float] = {}
            for e in self.table.candidates(self.calls[c], size):  # the fastest first
                found.setdefault(self._max_resident_elements(c, e), e.seconds)
            self._fastest[key] = tuple(found.items())
        return self._fastest[key]
