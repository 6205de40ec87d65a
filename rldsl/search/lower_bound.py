"""A lower bound on the time of a step, when only some of its calls are placed.

In: a problem, its candidates, blocks of some calls. Out: seconds. A step takes at least

- the longest chain from a call that reads a version of a model to the training that ends this version, since the next
  version is read one step later (the cycles of the steady state), and then the reshard to the first of them; with a lag
  of k, a chain through what runs ahead may take k + 1 steps;
- for each block, the time of all calls that cover it, plus the work of the calls inside it divided by its ranks.

A training on all ranks leaves no time for any other call, and a `generate` on all ranks leaves none for the calls that
depend on it: such calls lengthen every chain. A call without a block counts with its shortest time, and its least work,
on any block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from rldsl.search.call_costs import Candidate
from rldsl.search.candidates import CandidateTable
from rldsl.search.problem import Problem
from rldsl.search.reshard_bounds import ReshardBounds
from rldsl.search.space import Block

MAX_CHAINS = 64  # from one job to a training
Chain = tuple[frozenset[int], int]  # calls, and the steps that it may take


class VersionCycle(NamedTuple):
    """A chain from a call that reads a version of a model to the training that ends this version."""

    calls: frozenset[int]  # of the chain
    steps: int  # that it may take
    first: int  # the call that reads the version
    train: int  # the training


class Moving(NamedTuple):
    """For bounds that count what moves between a training and the calls that use its model."""

    chosen: Mapping[int, Candidate] = MappingProxyType({})  # of the calls that have one
    # the least seconds of (a call that uses a copy, its training) and what moves between them, where known
    pairs: Mapping[tuple[int, int], float] = MappingProxyType({})


class LowerBound:
    """Calls are named by their index in `problem.calls`."""

    def __init__(self, problem: Problem, table: CandidateTable, reshard_bounds: ReshardBounds):
        self.problem, self.calls, self.table = problem, problem.calls, table
        self.reshard_bounds = reshard_bounds
        self._seconds: dict[tuple[int, int, bool], float] = {}
        self._copies: dict[tuple[int, int], int] = {}
        self._bytes: dict[tuple[int, int, bool], tuple[int, int, int]] = {}
        self._trains = [problem.train_index.get(j.model) if j.kind != "train" else None for j in problem.calls]
        self._paths = [problem.models[j.model].path for j in problem.calls]

    def call_seconds(self, call: int, size: int, copies: bool = False) -> float:
        """The shortest time of a call on `size` ranks; inf where it does not fit. copies: whether it certainly uses a
        copy of a trained model."""
        key = (call, size, copies)
        if key not in self._seconds:
            candidates = self.table.candidates(self.calls[call], size)
            self._seconds[key] = next((e.seconds for e in candidates if not copies or self.table.fits(
                e.min_bytes + e.copy_bytes)), inf)
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
    def version_cycles(self) -> tuple[VersionCycle, ...]:
        """The chains from every read of a trained model to its training; without those that another one from the same
        read contains that may take as many steps."""
        jobs, index, problem = self.problem.jobs, self.problem.call_index, self.problem
        readers: list[list[int]] = [[] for _ in jobs]
        for j in jobs:
            for b in j.depends_on:
                readers[b].append(j.number)
        found: list[VersionCycle] = []
        for model, train in problem.first_train.items():
            chains: dict[int, set[Chain]] = {}  # job -> the chains from it to the training
            for n in range(train, -1, -1):
                after = {(frozenset[int](), 1)} if n == train else set().union(*[chains.get(r, ()) for r in readers[n]])
                own = frozenset([index[n]]) if n in index else frozenset[int]()
                ahead = n in problem.may_run_ahead
                chains[n] = self._longest({(c | own, problem.graph.lag + 1 if ahead else steps) for c, steps in after})
                if jobs[n].model == model:
                    found += [VersionCycle(c, steps, index[n], index[train]) for c, steps in sorted(
                        chains[n], key=lambda x: (sorted(x[0]), x[1]))]
        return tuple(x for x in found if not any(
            x.calls < o.calls and (o.steps, o.first, o.train) == (x.steps, x.first, x.train) for o in found))

    def _longest(self, chains: set[Chain]) -> set[Chain]:
        """The `MAX_CHAINS` longest of chains that begin with the same job: with alternatives one after another there
        may be exponentially many, and a bound needs none of them."""
        if len(chains) <= MAX_CHAINS:
            return chains
        return set(sorted(chains, key=lambda x: (-sum([self.min_seconds[c] for c in x[0]]) / x[1], sorted(x[0])))[
            :MAX_CHAINS])

    @cached_property
    def dependents(self) -> tuple[frozenset[int], ...]:
        """For each call, the calls that depend on its outputs."""
        jobs, index = self.problem.jobs, self.problem.call_index
        ancestors: list[frozenset[int]] = []
        for j in jobs:
            ancestors.append(frozenset(j.depends_on).union(*(ancestors[b] for b in j.depends_on)))
        return tuple(frozenset(index[j.number] for j in jobs if j.is_call and c.number in ancestors[j.number])
                     for c in self.calls)

    def step_seconds(self, blocks: Mapping[int, Block], known: Mapping[int, float] | None = None,
                     moving: Moving | None = None) -> float:
        """blocks: of some calls. known: the seconds of calls whose strategy is chosen, or which cannot be faster.
        moving: None: what moves takes no time."""
        root, calls = self.problem.tree.root, self.calls
        partial = len(blocks) < len(calls)
        seconds = list(self.min_seconds) if partial else [0.0] * len(calls)
        work = list(self.min_work) if partial else seconds[:]
        for c, b in blocks.items():
            start, stop = b
            if known and c in known:
                each = known[c]
            else:
                train = self._trains[c]
                each = self.call_seconds(c, stop - start, train is not None and blocks.get(train, b) != b)
            seconds[c], work[c] = each, each * (stop - start)
        bound = sum(work) / root.size
        on_all_ranks = {c for c, b in blocks.items() if b == root}
        trains = {c for c in on_all_ranks if calls[c].kind == "train"}
        spread = [c for c in on_all_ranks if calls[c].kind == "generate"]
        for cycle, steps, first, train in self.version_cycles:
            alone = trains
            if spread:
                alone = trains.union(c for c in spread if self.dependents[c] >= cycle - {c} - trains)
            if alone:
                chain = sum([seconds[c] for c in alone]) + sum([seconds[c] for c in cycle - alone]) / steps
            else:
                chain = sum([seconds[c] for c in cycle]) / steps
            if chain > bound:
                bound = chain
            if moving is not None and first != train and first in blocks and train in blocks:
                moved = self._moving_seconds(first, train, blocks, seconds, moving)
                # while parameters move, other calls may run on all ranks
                if (chain := (sum([seconds[c] for c in cycle]) + moved) / steps) > bound:
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

    def _moving_seconds(self, first: int, train: int, blocks: Mapping[int, Block], seconds: Sequence[float],
                        moving: Moving) -> float:
        """By how much a chain from call `first` to the training of its model is longer than its calls, at least,
        because the trained parameters move to `first` after it. seconds: that the chain counts for each call."""
        src, dst, e = blocks[train], blocks[first], moving.chosen.get(first)
        pair = moving.pairs.get((first, train)) or self.reshard_bounds.pair_seconds(train, src, first, dst, e)
        more = pair - seconds[first] - seconds[train]
        return max(more, 0.0) if more < inf else 0.0

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
