"""A lower bound on the time of a step, when only some of its calls are placed.

In: a problem, its candidates, blocks of some calls. Out: seconds. A step takes at least

- the longest chain from a call that reads a version of a model to the training that ends this version, since the next
  version is read one step later (the cycles of the steady state); with a lag of k, a chain through what runs ahead may
  take k + 1 steps;
- for each block, the time of all calls that cover it, plus the work of the calls inside it divided by its ranks.

A training on all ranks leaves no time for any other call, and a `generate` on all ranks leaves none for the calls that
depend on it: such calls lengthen every chain. A call without a block counts with its shortest time, and its least work,
on any block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import inf

from rldsl.search.candidates import CandidateTable
from rldsl.search.problem import Problem
from rldsl.search.space import Block


class LowerBound:
    """Calls are named by their index in `problem.calls`."""

    def __init__(self, problem: Problem, table: CandidateTable):
        self.problem, self.calls, self.table = problem, problem.calls, table
        self._seconds: dict[tuple[int, int], float] = {}
        self._copies: dict[tuple[int, int], int] = {}
        self._bytes: dict[tuple[int, int, bool], tuple[int, int, int]] = {}
        self._trains = [problem.train_index.get(j.model) if j.kind != "train" else None for j in problem.calls]
        self._paths = [problem.models[j.model].path for j in problem.calls]

    def call_seconds(self, call: int, size: int) -> float:
        """The shortest time of a call on `size` ranks; inf where it does not fit."""
        key = (call, size)
        if key not in self._seconds:
            candidates = self.table.candidates(self.calls[call], size)
            self._seconds[key] = candidates[0].seconds if candidates else inf
        return self._seconds[key]

    @cached_property
    def block_sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of the blocks that each call may have."""
        return tuple(tuple(dict.fromkeys(b.size for b in self.problem.blocks(job, ()))) for job in self.calls)

    @cached_property
    def min_seconds(self) -> tuple[float, ...]:
        """The shortest time of each call on any block."""
        return tuple(min(self.call_seconds(c, n) for n in sizes) for c, sizes in enumerate(self.block_sizes))

    @cached_property
    def min_work(self) -> tuple[float, ...]:
        """The least work of each call, in seconds times ranks, on any block."""
        return tuple(min(self.call_seconds(c, n) * n for n in sizes) for c, sizes in enumerate(self.block_sizes))

    @cached_property
    def version_cycles(self) -> tuple[tuple[frozenset[int], int], ...]:
        """The calls of every chain from a read of a trained model to its training, and the steps that it may take;
        without the chains that another one contains that may take as many."""
        jobs, index, problem = self.problem.jobs, self.problem.call_index, self.problem
        cycles: set[tuple[frozenset[int], int]] = set()

        def walk_back(n: int, chain: frozenset[int], steps: int, model: str) -> None:
            chain = chain | {index[n]} if n in index else chain
            steps = problem.graph.lag + 1 if n in problem.may_run_ahead else steps
            if jobs[n].model == model:
                cycles.add((chain, steps))
            for b in jobs[n].depends_on:
                walk_back(b, chain, steps, model)

        for model, train in problem.first_train.items():
            walk_back(train, frozenset(), 1, model)
        return tuple((c, n) for c, n in sorted(cycles, key=lambda x: (sorted(x[0]), x[1]))
                     if not any(c < other and n == steps for other, steps in cycles))

    @cached_property
    def dependents(self) -> tuple[frozenset[int], ...]:
        """For each call, the calls that depend on its outputs."""
        jobs, index = self.problem.jobs, self.problem.call_index
        ancestors: list[frozenset[int]] = []
        for j in jobs:
            ancestors.append(frozenset(j.depends_on).union(*(ancestors[b] for b in j.depends_on)))
        return tuple(frozenset(index[j.number] for j in jobs if j.is_call and c.number in ancestors[j.number])
                     for c in self.calls)

    def step_seconds(self, blocks: Mapping[int, Block], known: Mapping[int, float] | None = None) -> float:
        """blocks: of some calls. known: the seconds of calls whose strategy is chosen."""
        root, calls = self.problem.tree.root, self.calls
        partial = len(blocks) < len(calls)
        seconds = list(self.min_seconds) if partial else [0.0] * len(calls)
        work = list(self.min_work) if partial else seconds[:]
        for c, (start, stop) in blocks.items():
            each = known[c] if known and c in known else self.call_seconds(c, stop - start)
            seconds[c], work[c] = each, each * (stop - start)
        bound = sum(work) / root.size
        on_all_ranks = {c for c, b in blocks.items() if b == root}
        trains = {c for c in on_all_ranks if calls[c].kind == "train"}
        spread = [c for c in on_all_ranks if calls[c].kind == "generate"]
        for cycle, steps in self.version_cycles:
            alone = trains
            if spread:
                alone = trains.union(c for c in spread if self.dependents[c] >= cycle - {c} - trains)
            if alone:
                chain = sum([seconds[c] for c in alone]) + sum([seconds[c] for c in cycle - alone]) / steps
            else:
                chain = sum([seconds[c] for c in cycle]) / steps
            if chain > bound:
                bound = chain
        placed = [(start, stop, seconds[c], work[c]) for c, (start, stop) in blocks.items()]
        for start, stop in set(blocks.values()):
            covering = inside = 0.0
            for first, last, call_seconds, call_work in placed:
                if first <= start and stop <= last:
                    covering += call_seconds
                elif start <= first and last <= stop:
                    inside += call_work
            if (busy := covering + inside / (stop - start)) > bound:
                bound = busy
        return bound

    def call_bytes(self, call: int, size: int, copies: bool = False) -> tuple[int, int, int]:
        """(static, shared, active) bytes that a call on `size` ranks takes at least, each minimized separately. copies:
        whether it certainly uses a copy of a trained model, which then counts as active."""
        key = (call, size, copies)
        if key not in self._bytes:
            candidates = self.table.candidates(self.calls[call], size)
            none = 1 << 62
            self._bytes[key] = (min((e.static_bytes for e in candidates), default=none),
                                min((e.shared_bytes for e in candidates), default=none),
                                min((e.active_bytes + copies * e.copy_bytes for e in candidates), default=none))
        return self._bytes[key]

    def least_copy_bytes(self, call: int, size: int) -> int:
        """Of the copies that a call on `size` ranks may use."""
        key = (call, size)
        if key not in self._copies:
            self._copies[key] = min((e.copy_bytes for e in self.table.candidates(self.calls[call], size)), default=0)
        return self._copies[key]

    def moves(self, call: int, block: Block, train_block: Block | None) -> bool:
        """Whether a call on `block` certainly uses a copy, because its model is trained on other ranks. train_block: of
        that training; None: not placed."""
        return train_block is not None and train_block != block and self.calls[call].kind != "train"

    def peak_bytes(self, blocks: Mapping[int, Block], inside: Block | None = None) -> int:
        """Bytes that some rank (of `inside`, if given) needs at least."""
        among = {b for b in blocks.values() if inside is None or inside[0] <= b[0] and b[1] <= inside[1]}
        return max([self._peak_bytes(b, blocks) for b in among], default=0)

    def _peak_bytes(self, at: Block, blocks: Mapping[int, Block]) -> int:
        static, active = 0, 0
        shared: dict[str, int] = {}  # by model directory
        for c, b in blocks.items():
            if not b[0] <= at[0] or not at[1] <= b[1]:
                continue
            train = self._trains[c]
            copies = train is not None and train in blocks and blocks[train] != b  # as `moves`
            own_static, own_shared, own_active = self.call_bytes(c, b[1] - b[0], copies)
            static += own_static
            if own_active > active:
                active = own_active
            path = self._paths[c]
            if own_shared > shared.get(path, 0):
                shared[path] = own_shared
        return static + active + sum(shared.values())
