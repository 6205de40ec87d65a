"""Which strategies of a call on so many ranks are worth a look, with their costs.

In: a problem. Out: entries by call and number of ranks, the fastest first. Left out is what cannot fit a device even
alone, and what another strategy beats in time and memory; where parameters move between calls of a model, or several
calls share a directory, only one under the same layout beats another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from rldsl.plan.backends import described, unable
from rldsl.plan.model import DEFAULT_BACKEND
from rldsl.search.call_costs import CallMemory, Candidate, call_memory, candidate_cost
from rldsl.search.isolated_call import IsolatedCall
from rldsl.search.problem import FixedCall, Job, Problem
from rldsl.search.space import Block, Kind, Strategy, divisions, micro_batch_sizes, with_chunks, zero_levels

CHUNKS = (1,)  # of layers on each rank of a pipeline, where the program does not say
BOUNDS = ("mbs", "mbt", "vpp", "backend")  # options that say themselves what is tried
FEW, MORE = 3, 6  # sizes of micro-batches that are kept for a layout, the largest that fit; of a pipeline


class CandidateTable:
    """Costs are worked out when they are asked for, once."""

    def __init__(self, problem: Problem, reserve: int = 0, offload: bool = False):
        """reserve: bytes of a device that are kept free. offload: whether it is tried."""
        self.problem, self.memory = problem, max(problem.memory - reserve, 1) if problem.memory else 0
        self.offload = offload
        self._entries: dict[tuple[int, int], tuple[Candidate, ...]] = {}
        self._costs: dict[tuple[int, Strategy, int, bool], Candidate] = {}
        self._memory: dict[tuple[int, Strategy, int, bool], CallMemory] = {}
        self._worlds: dict[tuple[object, ...], IsolatedCall] = {}

    def entries(self, job: Job, size: int) -> tuple[Candidate, ...]:
        key = (job.number, size)
        if key not in self._entries:
            self._entries[key] = tuple(sorted(self._worth(job, size), key=lambda e: (e.seconds, e.least, e.strategy)))
        return self._entries[key]

    def cost(self, job: Job, s: Strategy, size: int, own: bool = False) -> Candidate:
        key = (job.number, s, size, own or job.kind == "train")
        if key not in self._costs:
            world, found = self.world(job, s, size, key[3]), self._bytes(job, s, size, key[3])
            self._costs[key] = candidate_cost(world, self.problem, job, s, size, found, key[3])
        return self._costs[key]

    def world(self, job: Job, s: Strategy, size: int, own: bool) -> IsolatedCall:
        key = (job.number, s.degrees, size, own)
        if key not in self._worlds:
            self._worlds[key] = IsolatedCall(self.problem, job, s, size, own)
        return self._worlds[key]

    def _bytes(self, job: Job, s: Strategy, size: int, own: bool) -> CallMemory:
        key = (job.number, s, size, own)
        if key not in self._memory:
            self._memory[key] = call_memory(self.problem, self.world(job, s, size, own), job, s)
        return self._memory[key]

    def fits(self, size: int) -> bool:
        return not self.memory or size <= self.memory

    def _worth(self, job: Job, size: int) -> Iterator[Candidate]:
        fixed = self.problem.fixed.get(job.number, FixedCall())
        if fixed.strategy is not None:
            if fixed.block is None or fixed.block.size == size:
                yield self.cost(job, fixed.strategy, size)
            return
        layouts: dict[tuple[int | str, ...], list[Candidate]] = {}
        for e in self._all(job, size, dict(fixed.options)):
            layouts.setdefault(self._kind(job, e.strategy), []).append(e)
        for alike in layouts.values():
            yield from undominated(alike)

    def _kind(self, job: Job, s: Strategy) -> tuple[int | str, ...]:
        """Strategies of different kinds do not compare: what moves differs, or what others have there already."""
        model = self.problem.models[job.model]
        if model.home:
            return s.degrees
        others = (self.problem.models[j.model] for j in self.problem.calls)
        same = sum(m.path == model.path and (not m.home or bool(m.base)) for m in others)
        return (s.tp, s.pp, s.ep) if same > 1 else ()

    def _all(self, job: Job, size: int, given: Mapping[str, object]) -> Iterator[Candidate]:
        problem, family = self.problem, self.problem.families[job.model]
        kind, tokens = cast(Kind, job.kind), problem.tokens(job)
        chunks = (cast(int, given["vpp"]),) if "vpp" in given else CHUNKS
        backend = cast(str, given.get("backend", DEFAULT_BACKEND))
        for division in divisions(kind, size, problem.cluster.gpus, family, tokens):
            plain = replace(division, backend=backend)
            for s in (x for c in with_chunks(kind, plain, family.layers, chunks) for z in zero_levels(kind, c)
                      for x in self._variants(job, z)):
                as_given = all(_option_value(s, name) == value for name, value in given.items() if name not in BOUNDS)
                if as_given and self._able(job, s):
                    few = self._largest(self._sizes(job, s, given), job, size, FEW if s.pp == 1 else MORE)
                    yield from (self.cost(job, x, size) for x in few)

    def _able(self, job: Job, s: Strategy) -> bool:
        """Whether the backend can run the call under this strategy. A call that it cannot run at all is left to the
        compiler, which says why (RL0327)."""
        description, layout = described(s.backend), s.layout(Block(0, s.dp * s.tp * s.pp * s.cp).mesh())
        if description is None or job.kind not in description.calls:
            return True
        adapters = bool(self.problem.models[job.model].base)
        return not (unable(description, job.kind, layout, adapters)
                    or description.problem(self.problem.families[job.model], layout))

    def _sizes(self, job: Job, s: Strategy, given: Mapping[str, object]) -> list[Strategy]:
        """With all sizes of micro-batches, or as the program says. A `generate` decodes as many sequences as fit a
        number of tokens (`placement/budget.py`)."""
        tokens, mbs = cast(int, given.get("mbt", 0)), cast(int, given.get("mbs", 0))
        if job.kind == "generate" and tokens:
            fit = max(tokens // self.problem.tokens(job), 1)
            return [replace(s, mbs=min(mbs or fit, fit))]
        some = (mbs,) if tokens or "mbs" in given else micro_batch_sizes(self._rows(job, s.dp), s.pp)
        return [replace(s, mbs=m, mbt=tokens) for m in some]

    def _largest(self, ways: Sequence[Strategy], job: Job, size: int, few: int) -> Sequence[Strategy]:
        """Of strategies that need more and more memory, the last few that fit."""
        own = job.kind == "train"

        def over(s: Strategy) -> bool:
            return not self.fits(self._bytes(job, s, size, own).least)

        end = bisect_left(ways, True, key=over) if self.memory else len(ways)
        return ways[max(0, end - few) : end]

    def _variants(self, job: Job, s: Strategy) -> tuple[Strategy, ...]:
        """With recomputation, and offloaded. A copy of a trained model is not offloaded: it goes, and comes anew.
        Neither is what several copies come from: each would bring it in anew."""
        ways = (s, replace(s, recompute=True)) if job.kind == "train" else (s,)
        uses = sum(j.model == job.model and j.kind != "train" for j in self.problem.calls)
        may = uses < 2 if job.kind == "train" else not self.problem.models[job.model].home
        return (*ways, *(replace(x, offload=True) for x in ways)) if may and self.offload else ways

    def _rows(self, job: Job, dp: int) -> int:
        """The most rows of a shard: of a minibatch, of training."""
        node, frame = job.node, self.problem.frames[job.frames[0]]
        if job.kind == "generate":
            return -(-frame.count // frame.per_prompt // dp) * frame.per_prompt
        count = -(-frame.count // node.minibatches) if job.kind == "train" else frame.count  # type: ignore[union-attr]
        return -(-count // dp)


def undominated(entries: list[Candidate]) -> list[Candidate]:
    """Those that no other beats or equals in seconds, in how many ranks wait for each other, in bytes that stay and in
    bytes while it runs."""
    kept: list[Candidate] = []
    for e in sorted(entries, key=lambda e: (e.seconds, e.resident, e.active, e.strategy)):
        if not any(k.resident <= e.resident and k.active <= e.active and k.away <= e.away and k.unit <= e.unit
                   for k in kept):
            kept.append(e)
    return kept


def _option_value(s: Strategy, name: str) -> object:
    """An option as a program says it."""
    return ("full" if s.recompute else "none") if name == "recompute" else getattr(s, name)
