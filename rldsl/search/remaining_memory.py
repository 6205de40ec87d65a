"""What memory a subspace of a placement search leaves to each call at most: what needs more fits nowhere in it.

In: the blocks of all calls, and the candidates of some. Out: `Remaining` of each call, on every one of its ranks.
Calls are named by their index in the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Evaluator
from rldsl.search.space import Block


class LeastBytes(NamedTuple):
    """What a call takes at least, as of a `Candidate`."""

    static: int  # trained state
    shared: int  # read-only parameters
    active: int  # while it runs
    copy: int  # a copy of a trained model, where it certainly uses one


class Remaining(NamedTuple):
    """The bytes that all other calls leave to one on every one of its ranks."""

    resting: int  # for what it always holds
    waiting: int  # for that and a copy of its model, while earlier calls run
    running: int  # for all that it needs while it runs


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the calls of a step hold. Read-only parameters of one model directory count once, and so do copies of a
    model on the same ranks."""

    memory: int  # bytes of a rank
    models: Sequence[str]  # of each call
    paths: Sequence[str]  # the directory of each call's model
    blocks: Sequence[Block]  # the ranks of each call
    least: Sequence[LeastBytes]  # of each call
    position: Mapping[int, int]  # call -> its place in the order of the step

    def remaining(self) -> tuple[Remaining, ...]:
        """Of each call, when all others take their least."""
        groups = self._calls_on_fullest_ranks()
        return tuple([self._remaining_of(c, [calls for calls in groups if c in calls])
                      for c in range(len(self.blocks))])

    def _calls_on_fullest_ranks(self) -> list[list[int]]:
        """The calls that share a rank, for ranks with different ones; not for a rank that has only some of the calls
        of another one. For example, a call on ranks 0:8 and one on ranks 0:4 make one group, of both."""
        sharing = {frozenset([c for c, (start, stop) in enumerate(self.blocks) if start <= low and high <= stop])
                   for low, high in set(self.blocks)}
        return [sorted(calls) for calls in sharing if not any(calls < other for other in sharing)]

    def _remaining_of(self, c: int, groups: Sequence[Sequence[int]]) -> Remaining:
        """The least over the ranks of a call. groups: the calls of each kind of rank that it has."""
        resting = waiting = running = self.memory
        for calls in groups:
            others = [k for k in calls if k != c]
            copying = [k for k in others if self.least[k].copy]
            free = self.memory - self._always_held(others, self.paths[c])
            running = min(running, free - self._waiting_copies(c, copying))
            for k in others:  # while call k runs
                left = free - self.least[k].active - self.least[k].copy - self._waiting_copies(k, copying)
                resting = min(resting, left)
                if self.position[k] <= self.position[c] and not self._may_share_copy(k, c):
                    waiting = min(waiting, left)
        return Remaining(resting, waiting, running)

    def _always_held(self, calls: Sequence[int], path: str) -> int:
        """Trained states and read-only parameters of some calls, without those of the directory `path`."""
        shared: dict[str, int] = {}
        for k in calls:
            if self.least[k].shared and self.paths[k] != path:
                shared[self.paths[k]] = max(shared.get(self.paths[k], 0), self.least[k].shared)
        return sum([self.least[k].static for k in calls]) + sum(shared.values())

    def _waiting_copies(self, k: int, copying: Sequence[int]) -> int:
        """Bytes of the copies that calls of `copying` use after call `k`, and that it does not use itself: all copies
        arrive when a step begins."""
        found: dict[tuple[str, Block], int] = {}
        for m in copying:
            if m != k and self.position[m] >= self.position[k] and not self._may_share_copy(m, k):
                key = self.models[m], self.blocks[m]
                found[key] = max(found.get(key, 0), self.least[m].copy)
        return sum(found.values())

    def _may_share_copy(self, a: int, b: int) -> bool:
        """Whether two calls may use the same copy of a model."""
        return self.models[a] == self.models[b] and self.blocks[a] == self.blocks[b]


class RemainingMemory:
    """What is left in subspaces of one search."""

    def __init__(self, evaluator: Evaluator):
        self.evaluator, self.calls, self.table = evaluator, evaluator.calls, evaluator.table
        self.bound, self.train_index = evaluator.bound, evaluator.problem.train_index
        self.paths = [evaluator.problem.models[j.model].path for j in self.calls]

    def remaining_bytes(self, every: Sequence[Block], chosen: Mapping[int, Candidate]) -> tuple[Remaining, ...]:
        """What all other calls leave to each call, when they take their least."""
        if not self.table.memory:
            return (Remaining(0, 0, 0),) * len(every)
        index = self.evaluator.problem.call_index
        position = {index[n]: at for at, n in enumerate(self.evaluator.schedule(every).jobs) if n in index}
        least = [self.least_bytes(c, every, chosen) for c in range(len(every))]
        return StepMemory(self.table.memory, [job.model for job in self.calls], self.paths, every, least,
                          position).remaining()

    def least_bytes(self, c: int, every: Sequence[Block], chosen: Mapping[int, Candidate]) -> LeastBytes:
        e, train = chosen.get(c), self.train_index.get(self.calls[c].model)
        if e is not None:
            copy = e.copy_bytes if self.needs_copy(c, e, every, chosen) else 0
            return LeastBytes(e.static_bytes, e.shared_bytes, e.active_bytes, copy)
        moves = train is not None and self.bound.moves(c, every[c], every[train])
        return LeastBytes(*self.bound.call_bytes(c, every[c].size),
                          self.bound.least_copy_bytes(c, every[c].size) if moves else 0)

    def needs_copy(self, c: int, e: Candidate, every: Sequence[Block], chosen: Mapping[int, Candidate]) -> bool:
        """Whether a call with this candidate certainly uses a copy of its model, which is alive while it runs: on other
        ranks than the training, or if the training, or any that it may get, divides the parameters differently
        (`reshard/alias.py`). A call that uses the trained parameters has the degrees of the training."""
        train = self.train_index.get(self.calls[c].model)
        if train is None or not e.copy_bytes:
            return False
        if every[c] != every[train]:
            return True
        if train in chosen:
            return e.strategy.division != chosen[train].strategy.division
        return e.strategy.division not in self.table.divisions(self.calls[train], every[train].size)
