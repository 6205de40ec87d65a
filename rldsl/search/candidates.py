"""The strategies of a call that the search considers, with their costs.

In: a problem. Out: candidates by call and number of ranks, the fastest first. Strategies that do not fit a device even
alone are left out, and so are those that another one dominates in time and memory. Where parameters move between calls
of a model, or several calls share a directory, a strategy dominates only others with the same layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rldsl.graph import model as g
from rldsl.placement.budget import max_row_tokens
from rldsl.plan.backends import described, unable
from rldsl.plan.model import DEFAULT_BACKEND
from rldsl.search.call_costs import (
    CallMemory,
    Candidate,
    build_candidate,
    build_offloaded,
    call_memory,
    call_seconds,
    least_bytes,
)
from rldsl.search.isolated_call import IsolatedCall
from rldsl.search.problem import FixedCall, Job, Problem
from rldsl.search.space import Block, Kind, Strategy, divisions, micro_batch_sizes, with_chunks, zero_levels
from rldsl.sharding.gradient_leaves import divides
from rldsl.simulate.time_costs import engine_room

CHUNKS = (2, 4)  # of layers per stage (vpp) that are tried, where the program does not say
MIN_FILL = 0.05  # share of a minibatch in which a pipeline fills and drains, from which chunks are tried
GENERATED = ("mbs", "mbt", "vpp", "offload", "backend")  # where the program gives a value, no other one is tried
NUM_SIZES, NUM_PIPELINE_SIZES = 3, 6  # micro-batch sizes kept per layout: the largest that fit
NUM_TOKEN_LIMITS = 2  # limits of tokens kept per layout: the largest that fit
MAX_MEAN_ROW = 0.9  # of the longest row: limits of tokens are tried where rows are shorter on average


@dataclass(frozen=True, slots=True)
class CostsOfLayout:
    """A call under a layout, and what is known of its costs, by the options of a strategy that they depend on."""

    isolated: IsolatedCall  # the call under that layout
    memory: dict[tuple[int, int, bool, bool], CallMemory] = field(default_factory=dict)
    seconds: dict[tuple[int, int, bool], float] = field(default_factory=dict)  # per step


class CandidateTable:
    """Candidates are computed on demand, and cached."""

    def __init__(self, problem: Problem, reserve: int = 0):
        """reserve: bytes per device that are kept free."""
        self.problem, self.memory = problem, max(problem.memory - reserve, 1) if problem.memory else 0
        self._candidates: dict[tuple[int, int], tuple[Candidate, ...]] = {}
        self._with_room: dict[tuple[int, int], tuple[Candidate, ...]] = {}
        self._divisions: dict[tuple[int, int], frozenset[tuple[int | str, ...]]] = {}
        self._by_strategy: dict[tuple[int, Strategy, int, bool], Candidate] = {}
        self._by_layout: dict[tuple[object, ...], CostsOfLayout] = {}
        self._plain_passes: dict[tuple[object, ...], dict[Hashable, Any]] = {}  # of a call
        self._pass_peaks: dict[tuple[object, ...], dict[Hashable, Any]] = {}  # of a call

    def candidates(self, job: Job, size: int) -> tuple[Candidate, ...]:
        """Those that a device has room for, with a copy of a trained model where they certainly need one."""
        key = (job.number, size)
        if key not in self._with_room:
            self._with_room[key] = self._filter_by_copies(job, size, self.fitting_alone(job, size))
        return self._with_room[key]

    def fitting_alone(self, job: Job, size: int) -> tuple[Candidate, ...]:
        """Those that fit a device without a copy of a trained model."""
        key = (job.number, size)
        if key not in self._candidates:
            self._candidates[key] = tuple(sorted(self._worthwhile(job, size),
                                                 key=lambda e: (e.seconds, e.min_bytes, e.strategy)))
        return self._candidates[key]

    def _filter_by_copies(self, job: Job, size: int, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Without those whose copy of a trained model leaves too little memory, while no training on as many ranks
        divides the parameters like them. Any such training may be on the ranks of the call, which then needs none."""
        train = self.problem.first_train.get(job.model)
        if train is None or job.kind == "train" or all(self.fits(e.min_bytes + e.copy_bytes) for e in found):
            return found
        divisions = self.divisions(self.problem.jobs[train], size)
        return tuple(e for e in found if self.fits(e.min_bytes + e.copy_bytes) or e.strategy.division in divisions)

    def divisions(self, train: Job, size: int) -> frozenset[tuple[int | str, ...]]:
        """How a training on `size` ranks may divide the parameters."""
        key = (train.number, size)
        if key not in self._divisions:
            self._divisions[key] = frozenset(e.strategy.division for e in self.candidates(train, size))
        return self._divisions[key]

    def take(self, found: Mapping[tuple[int, int], tuple[Candidate, ...]]) -> None:
        """Those of `fitting_alone` by job number and ranks, as another table found them."""
        self._candidates |= found

    def candidate(self, job: Job, s: Strategy, size: int, own: bool = False) -> Candidate:
        key = (job.number, s, size, own or job.kind == "train")
        if key not in self._by_strategy:
            costs = self._costs(job, s, size, key[3])
            self._by_strategy[key] = build_candidate(costs.isolated, self.problem, job, s, size,
                                                     self._memory_of(costs, job, s), key[3],
                                                     self._seconds_of(costs, job, s))
        return self._by_strategy[key]

    def isolated_call(self, job: Job, s: Strategy, size: int, own: bool) -> IsolatedCall:
        return self._costs(job, s, size, own).isolated

    def _costs(self, job: Job, s: Strategy, size: int, own: bool) -> CostsOfLayout:
        """own: as of `build_candidate`."""
        key = (job.number, s.degrees, size, own)
        if key not in self._by_layout:
            of = job.number, own, s.backend
            self._by_layout[key] = CostsOfLayout(IsolatedCall(
                self.problem, job, s, size, own, self._plain_passes.setdefault(of, {}),
                self._pass_peaks.setdefault(of, {})))
        return self._by_layout[key]

    def _memory_of(self, costs: CostsOfLayout, job: Job, s: Strategy) -> CallMemory:
        key = s.mbs, s.mbt, s.recompute, s.offload
        if key not in costs.memory:
            costs.memory[key] = call_memory(self.problem, costs.isolated, job, s)
        return costs.memory[key]

    def _seconds_of(self, costs: CostsOfLayout, job: Job, s: Strategy) -> float:
        """Seconds of the call per step."""
        key = s.mbs, s.mbt, s.recompute
        if key not in costs.seconds:
            costs.seconds[key] = call_seconds(costs.isolated, costs.isolated.event(s)) * job.times_per_step
        return costs.seconds[key]

    def _fits_alone(self, costs: CostsOfLayout, job: Job, s: Strategy) -> bool:
        """Whether a device has enough memory for the call and nothing else."""
        key = s.mbs, s.mbt, s.recompute, s.offload
        if self.memory and key not in costs.memory:
            found = call_memory(self.problem, costs.isolated, job, s, self.memory)
            if not self.fits(found.min_bytes):
                return False
            costs.memory[key] = found
        return self.fits(self._memory_of(costs, job, s).min_bytes)

    def fits(self, size: int) -> bool:
        return not self.memory or size <= self.memory

    def _worthwhile(self, job: Job, size: int) -> Iterator[Candidate]:
        fixed = self.problem.fixed.get(job.number, FixedCall())
        if fixed.strategy is not None:
            if fixed.block is None or fixed.block.size == size:
                yield self.candidate(job, fixed.strategy, size)
            return
        layouts: dict[tuple[int | str, ...], list[Candidate]] = {}
        key_of = self._comparison_keys(job)
        for e in self._all_candidates(job, size, dict(fixed.options)):
            layouts.setdefault(key_of(e.strategy), []).append(e)
        for comparable in layouts.values():
            yield from undominated(comparable)

    def _comparison_keys(self, job: Job) -> Callable[[Strategy], tuple[int | str, ...]]:
        """The key of a strategy of a call. Those with different keys do not dominate each other: their reshards differ,
        or the parameters that other calls share with them."""
        model, calls = self.problem.models[job.model], self.problem.calls
        if model.train_layout:
            # what moves depends on whether `zero` divides what is at rest, not on its level
            trains = sum(j.model == job.model and j.kind == "train" for j in calls)
            return (lambda s: (*s.division, s.dp, s.cp)) if trains == 1 else (lambda s: s.degrees)
        models = (self.problem.models[j.model] for j in calls)
        sharing = sum(m.path == model.path and (not m.train_layout or bool(m.base)) for m in models)
        return (lambda s: (s.tp, s.pp, s.ep)) if sharing > 1 else (lambda s: ())

    def _all_candidates(self, job: Job, size: int, given: Mapping[str, object]) -> list[Candidate]:
        problem, family = self.problem, self.problem.families[job.model]
        kind, tokens = cast(Kind, job.kind), problem.max_tokens(job)
        chunks = (cast(int, given["vpp"]),) if "vpp" in given else (1,)
        backend = cast(str, given.get("backend", DEFAULT_BACKEND))
        found: list[Candidate] = []
        for division in divisions(kind, size, problem.cluster.gpus, family, tokens):
            plain = replace(division, backend=backend)
            for s in (x for c in with_chunks(kind, plain, family.layers, chunks) for z in zero_levels(kind, c)
                      for x in _with_recompute(kind, z)):
                as_given = all(_option_value(s, name) == value for name, value in given.items()
                               if name not in GENERATED)
                if as_given and self._backend_supports(job, s) and _keeps_gradients(job.node, s) \
                        and self._engine_fits(job, s):
                    sizes = self._largest_that_fit(self._with_micro_batches(job, s, given), job, size,
                                                   NUM_SIZES if s.pp == 1 else NUM_PIPELINE_SIZES)
                    limits = self._largest_that_fit(self._with_token_limits(job, s, given), job, size,
                                                    NUM_TOKEN_LIMITS)
                    found += [self.candidate(job, x, size) for x in (*sizes, *limits)]
        if kind == "train" and "vpp" not in given:
            found += [*self._with_chunks(job, found, size)]
        return self._with_offload(job, found, size, cast(bool | None, given.get("offload")))

    def _with_chunks(self, job: Job, found: Sequence[Candidate], size: int) -> Iterator[Candidate]:
        """Strategies with several chunks of layers per stage that may be worth their messages and memory: where a
        pipeline takes long enough to fill and drain, and no other layout needs as little memory and is as fast. found:
        strategies without chunks."""
        front = undominated(list(found))

        def beaten(e: Candidate, seconds: float) -> bool:
            """Whether another layout needs as little as `e`, and no more than `seconds`."""
            return any(k.seconds <= seconds and _needs_as_little(k, e) for k in front)

        for e in found:
            fill = self._fill(job, e.strategy)
            for v in CHUNKS if fill >= MIN_FILL else ():
                # What costs least to compute comes first: the time if chunks cost nothing, the time itself, then the
                # memory, which is at least that of `e`.
                if beaten(e, e.seconds * (1 - fill * (1 - 1 / v))):
                    continue
                for s in with_chunks("train", e.strategy, self.problem.families[job.model].layers, (v,)):
                    if not self._backend_supports(job, s):
                        continue
                    costs = self._costs(job, s, size, True)
                    if beaten(e, self._seconds_of(costs, job, s)) or not self._fits_alone(costs, job, s):
                        continue
                    chunked = self.candidate(job, s, size)
                    if not beaten(chunked, chunked.seconds):
                        yield chunked

    def _fill(self, job: Job, s: Strategy) -> float:
        """The most that the share of a minibatch in which a pipeline without chunks fills and drains can be."""
        if s.pp == 1 or s.mbt:
            return 0.0
        count = -(-self._max_rows(job, s.dp) // s.mbs) if s.mbs else s.pp
        return (s.pp - 1) / (max(count, s.pp) + s.pp - 1)

    def _backend_supports(self, job: Job, s: Strategy) -> bool:
        """Whether the backend can run the call under this strategy. A call that it cannot run at all is left to the
        compiler, which explains why (RL0327)."""
        description, layout = described(s.backend), s.layout(Block(0, s.dp * s.tp * s.pp * s.cp).mesh())
        if description is None or job.kind not in description.calls:
            return True
        adapters = bool(self.problem.models[job.model].base)
        return not (unable(description, job.kind, layout, adapters)
                    or description.problem(self.problem.families[job.model], layout))

    def _engine_fits(self, job: Job, s: Strategy) -> bool:
        """Whether a serving engine, where the cluster file says that one generates, has memory for the weights and the
        longest sequence, as `simulate.check_engines` asks."""
        cluster, node = self.problem.cluster, job.node
        if not cluster.cache_gb or not isinstance(node, g.Generate) or node.conversation is not None:
            return True
        row = self.problem.lengths.of(self.problem.frames[node.frame])
        layout = s.layout(Block(0, s.dp * s.tp * s.pp * s.cp).mesh())
        return engine_room(cluster, self.problem.models[job.model], layout) >= row.prompt + row.longest

    def _with_micro_batches(self, job: Job, s: Strategy, given: Mapping[str, object]) -> list[Strategy]:
        """With every micro-batch size, or as the program says. A `generate` with a token budget decodes as many
        sequences as fit it (`placement/budget.py`)."""
        tokens, mbs = cast(int, given.get("mbt", 0)), cast(int, given.get("mbs", 0))
        if job.kind == "generate" and tokens:
            fit = max(tokens // self.problem.max_tokens(job), 1)
            return [s.with_micro_batches(min(mbs or fit, fit), s.mbt)]
        if isinstance(job.node, g.Train) and job.node.invariant:  # its passes do not depend on the placement
            return [s.with_micro_batches(s.mbs, tokens)]
        sizes = (mbs,) if tokens or "mbs" in given else micro_batch_sizes(self._max_rows(job, s.dp), s.pp)
        return [s.with_micro_batches(m, tokens) for m in sizes]

    def _with_token_limits(self, job: Job, s: Strategy, given: Mapping[str, object]) -> list[Strategy]:
        """With limits of tokens instead, as large as powers of two of the longest rows: where most rows are shorter,
        more of them fit in a micro-batch that needs as much memory."""
        problem, frames = self.problem, [self.problem.frames[f] for f in job.frames]
        longest = sum(map(max_row_tokens, frames))
        if (job.kind == "generate" or {"mbs", "mbt"} & {*given} or s.backend != DEFAULT_BACKEND
                or isinstance(job.node, g.Train) and job.node.invariant
                or sum(problem.lengths.of(f).tokens for f in frames) > MAX_MEAN_ROW * longest):
            return []
        sizes = micro_batch_sizes(self._max_rows(job, s.dp), s.pp)
        return [s.with_micro_batches(s.mbs, m * longest) for m in sizes if m]

    def _largest_that_fit(self, strategies: Sequence[Strategy], job: Job, size: int,
                          count: int) -> Sequence[Strategy]:
        """The last `count` strategies that fit, of a sequence of one layout that needs more and more memory."""
        if not strategies:
            return ()
        costs, end = self._costs(job, strategies[0], size, job.kind == "train"), len(strategies)
        if self.memory:
            if not self.fits(least_bytes(self.problem, costs.isolated, job)):
                return ()
            end = bisect_left(strategies, True, key=lambda s: not self._fits_alone(costs, job, s))
        return strategies[max(0, end - count) : end]

    def _with_offload(self, job: Job, found: Sequence[Candidate], size: int, given: bool | None) -> list[Candidate]:
        """With and without offloading, or as the program says. Only without where that frees memory for no other call,
        or the devices' memory is unknown. A copy of a trained model is not offloaded, because it is freed and sent
        again; nor is a training that feeds several copies, because each would onload it again."""
        uses = sum(j.model == job.model and j.kind != "train" for j in self.problem.calls)
        can_offload = uses < 2 if job.kind == "train" else not self.problem.models[job.model].train_layout
        plain = [] if given else found
        if not can_offload or given is False or not given and not (self.memory and len(self.problem.calls) > 1):
            return [*plain]
        offloaded = [build_offloaded(self.isolated_call(job, e.strategy, size, job.kind == "train"), job, e)
                     for e in found]
        self._by_strategy |= {(job.number, e.strategy, size, job.kind == "train"): e for e in offloaded}
        return [*plain, *offloaded]

    def _max_rows(self, job: Job, dp: int) -> int:
        """Rows of the dp rank that has most; for training, of one minibatch."""
        node, frame = job.node, self.problem.frames[job.frames[0]]
        if job.kind == "generate":
            return -(-frame.count // frame.per_prompt // dp) * frame.per_prompt
        count = -(-frame.count // node.minibatches) if isinstance(node, g.Train) else frame.count
        return -(-count // dp)


def _with_recompute(kind: Kind, s: Strategy) -> tuple[Strategy, ...]:
    return (s, replace(s, recompute=True)) if kind == "train" else (s,)


def undominated(entries: list[Candidate]) -> list[Candidate]:
    """The Pareto front: the candidates that no other one equals or beats in seconds, in seconds of the onload, in the
    number of ranks that wait for each other, in resident bytes and in active bytes."""
    kept: list[Candidate] = []
    for e in sorted(entries, key=lambda e: (e.seconds, e.resident_bytes, e.active_bytes, e.strategy)):
        if not any(_needs_as_little(k, e) for k in kept):  # all that are kept are as fast
            kept.append(e)
    return kept


def _needs_as_little(k: Candidate, e: Candidate) -> bool:
    """Whether `k` is at least as good as `e` in all but seconds."""
    return (k.active_bytes <= e.active_bytes and k.resident_bytes <= e.resident_bytes
            and k.onload_seconds <= e.onload_seconds and k.sync_ranks <= e.sync_ranks)


def _keeps_gradients(node: g.Node, s: Strategy) -> bool:
    """Whether the gradients of a model with `invariant=training` stay the same under a strategy."""
    if not (isinstance(node, g.Train) and node.invariant):
        return True
    return divides(s.dp, s.cp) and not (node.heads and max(s.tp, s.cp) > 1)


def _option_value(s: Strategy, name: str) -> object:
    """The value of an option, as a program writes it."""
    return ("full" if s.recompute else "none") if name == "recompute" else getattr(s, name)
