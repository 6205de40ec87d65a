"""What memory a subspace of a placement search leaves to each call at most: what needs more fits nowhere in it.

In: the blocks of all calls, and the candidates of some. Out: `Remaining` of each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rldsl.search.call_costs import Candidate
from rldsl.search.evaluator import Evaluator
from rldsl.search.remaining_bytes import LeastBytes, Remaining, StepMemory
from rldsl.search.space import Block


class RemainingMemory:
    """Calls are named by their index in `evaluator.calls`."""

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
