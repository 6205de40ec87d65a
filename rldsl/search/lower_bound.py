"""A lower bound on the time of a step, when only some of its calls are placed.

In: a problem, its candidates, blocks of some calls. Out: seconds. A step takes at least

- the longest chain from a call that reads a version of a model to the training that ends this version, since the next
  version is read one step later (the cycles of the steady state), and then the reshard to the first of them; with a lag
  of k, a chain through what runs ahead may take k + 1 steps;
- for each block, the time of all calls that cover it, plus the work of the calls inside it divided by its ranks.

A training on all ranks leaves no time for any other call, and a `generate` on all ranks leaves none for the calls that
depend on it: such calls lengthen every chain. In a chain a call may also follow another one on some of its ranks that
the list scheduler puts before it wherever it is. A call without a block counts with its shortest time, and its least
work, on any block.
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
MAX_KEPT = 1 << 16  # cached chains; the cache is emptied when it is full
Chain = tuple[frozenset[int], int]  # calls, and the steps that it may take
OrderedCalls = tuple[tuple[int, int], ...]  # (a call, another one that comes after it)


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
        self._chains: dict[tuple[object, ...], float] = {}  # a cache of `_longest_chain`
        self._ordered_chains: dict[tuple[object, ...], float] = {}  # a cache of `_longest_ordered_chain`
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

    @cached_property
    def ordered_calls(self) -> OrderedCalls:
        """(a, b): call b does not depend on a, and comes after it wherever all ranks of a are ranks of b. What a waits
        for, b waits for, too, so that `list_schedule` can start a no later than b, and at equal times it takes what
        comes first in the program. None where calls may run ahead, which come before others of their step."""
        problem, after = self.problem, list[frozenset[int]]()  # by job number: all that come before it
        for before in problem.predecessors:
            after.append(frozenset(before).union(*[after[b] for b in before]))
        if problem.graph.lag or problem.may_run_ahead:
            return ()
        return tuple((i, k) for i, a in enumerate(self.calls) for k, b in enumerate(self.calls[i + 1 :], i + 1)
                     if k not in self.dependents[i] and after[b.number].issuperset(problem.predecessors[a.number]))

    def step_seconds(self, blocks: Mapping[int, Block], known: Mapping[int, float] | None = None,
                     moving: Moving | None = None, limit: float = inf) -> float:
        """blocks: of some calls. known: the seconds of calls whose strategy is chosen, or which cannot be faster.
        moving: None: what moves takes no time. limit: a bound that reaches it need not be tight."""
        seconds, work = self._seconds_and_work(blocks, known)
        root = self.problem.tree.root
        on_all_ranks = tuple([c for c, b in blocks.items() if b == root])
        bound = max(sum(work) / root.size, self._longest_chain(seconds, on_all_ranks, keep=known is None))
        if bound >= limit:
            return bound
        ordered = tuple([(a, b) for a, b in self.ordered_calls if a in blocks and b in blocks and
                         blocks[b][0] <= blocks[a][0] and blocks[a][1] <= blocks[b][1]])
        if ordered:
            bound = max(bound, self._longest_ordered_chain(seconds, ordered))
            if bound >= limit:
                return bound
        if moving is not None:
            bound = max(bound, self._longest_moving_chain(blocks, seconds, moving))
        return max(bound, _busy_seconds(blocks, seconds, work))

    def _seconds_and_work(self, blocks: Mapping[int, Block],
                          known: Mapping[int, float] | None) -> tuple[list[float], list[float]]:
        """(seconds, seconds times ranks) of each call, at least. blocks, known: as of `step_seconds`."""
        partial = len(blocks) < len(self.calls)
        seconds = list(self.min_seconds) if partial else [0.0] * len(self.calls)
        work = list(self.min_work) if partial else seconds[:]
        for c, b in blocks.items():
            start, stop = b
            if known and c in known:
                each = known[c]
            else:
                train = self._trains[c]
                each = self.call_seconds(c, stop - start, train is not None and blocks.get(train, b) != b)
            seconds[c], work[c] = each, each * (stop - start)
        return seconds, work

    def _longest_chain(self, seconds: Sequence[float], on_all_ranks: tuple[int, ...], keep: bool) -> float:
        """Of the version cycles, with the calls that leave no time for any other. keep: whether other blocks may have
        the same seconds: it is the sizes of blocks that decide them, and many blocks have the same sizes."""
        if not keep:
            return self._chain_seconds(seconds, on_all_ranks)
        key = on_all_ranks, *seconds
        if key not in self._chains:
            if len(self._chains) >= MAX_KEPT:
                self._chains.clear()
            self._chains[key] = self._chain_seconds(seconds, on_all_ranks)
        return self._chains[key]

    def _chain_seconds(self, seconds: Sequence[float], on_all_ranks: tuple[int, ...]) -> float:
        longest = 0.0
        trains = {c for c in on_all_ranks if self.calls[c].kind == "train"}
        spread = [c for c in on_all_ranks if self.calls[c].kind == "generate"]
        for cycle, steps, _, _ in self.version_cycles:
            alone = trains
            if spread:
                alone = trains.union(c for c in spread if self.dependents[c] >= cycle - {c} - trains)
            chain = sum([seconds[c] for c in alone]) + sum([seconds[c] for c in cycle - alone]) / steps
            longest = max(longest, chain)
        return longest

    def _longest_ordered_chain(self, seconds: Sequence[float], ordered: OrderedCalls) -> float:
        """Of the chains from a call that reads a version of a model to the training that ends it, in which a call also
        follows what comes before it on its ranks. ordered: of `ordered_calls`, those of which this is so."""
        key = ordered, *seconds
        if key not in self._ordered_chains:
            if len(self._ordered_chains) >= MAX_KEPT:
                self._ordered_chains.clear()
            self._ordered_chains[key] = max([self._chain_to(train, model, seconds, ordered)
                                             for model, train in self.problem.train_index.items()], default=0.0)
        return self._ordered_chains[key]

    def _chain_to(self, train: int, model: str, seconds: Sequence[float], ordered: OrderedCalls) -> float:
        """The longest such chain of the calls of a model to its training."""
        longest: list[float] = []  # by call, to its end; -inf: no chain leads to it
        for c in range(train + 1):
            before = [longest[a] for a in range(c) if c in self.dependents[a] or (a, c) in ordered]
            if self.calls[c].model == model:
                before.append(0.0)
            longest.append(max(before, default=-inf) + seconds[c])
        return longest[train]

    def _longest_moving_chain(self, blocks: Mapping[int, Block], seconds: Sequence[float], moving: Moving) -> float:
        """Of the version cycles whose trained parameters move; meanwhile other calls may run on all ranks."""
        longest = 0.0
        for cycle, steps, first, train in self.version_cycles:
            if first != train and first in blocks and train in blocks:
                moved = self._moving_seconds(first, train, blocks, seconds, moving)
                longest = max(longest, (sum([seconds[c] for c in cycle]) + moved) / steps)
        return longest

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


def _busy_seconds(blocks: Mapping[int, Block], seconds: Sequence[float], work: Sequence[float]) -> float:
    """How long the ranks of some block are busy at least: with the calls that cover it, and their share of the work of
    those inside it. seconds, work: of each call."""
    longest = 0.0
    placed = [(start, stop, seconds[c], work[c]) for c, (start, stop) in blocks.items()]
    for start, stop in set(blocks.values()):
        covering = inside = 0.0
        for first, last, call_seconds, call_work in placed:
            if first <= start and stop <= last:
                covering += call_seconds
            elif start <= first and last <= stop:
                inside += call_work
        longest = max(longest, covering + inside / (stop - start))
    return longest
