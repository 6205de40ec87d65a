"""The placement problem: the calls of a step, their dependencies, and the cluster that they run on.

In: a graph and its models' families, a cluster, expected lengths. Out: a `Problem`. Calls and computations are jobs, in
program order; a job inside `every`, `repeat` or `until` blocks counts with its runs per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeGuard

from rldsl.clusters import Cluster
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.passes.run_ahead import steps_ahead
from rldsl.placement.model import Call, PlacedGraph, label
from rldsl.placement.place import ValueUses
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.expr import Program
from rldsl.plan.model import Model, Value
from rldsl.plan.prompt_sources import PromptSource, sources_of
from rldsl.plan.spaces import IndexedFrame
from rldsl.search.space import Block, BlockTree, Kind, Strategy
from rldsl.simulate.lengths import AT_MOST, Lengths

KINDS: Mapping[type[g.Node], Kind] = {g.Generate: "generate", g.Infer: "infer", g.Train: "train"}


@dataclass(frozen=True, slots=True)
class FixedCall:
    """What the program fixes of a call, and the search does not change."""

    block: Block | None = None  # its ranks; None: the search chooses them
    strategy: Strategy | None = None  # None: the search chooses it, within `options`
    options: tuple[tuple[str, object], ...] = ()  # (name, value) of the options that the program sets


@dataclass(frozen=True, slots=True)
class Job:
    """A call or a computation of one step."""

    number: int  # position in program order
    node: g.Node  # of the graph
    kind: Kind | Literal[""]  # "": a computation, or rows that a Python function writes
    model: str  # name; "" where there is none
    times_per_step: float  # runs per step, on average
    depends_on: tuple[int, ...]  # the jobs of the same step that write what this one reads
    placed_with: int  # the call whose ranks it uses: itself, unless it is a computation

    @property
    def name(self) -> str:
        return label(self.node)

    @property
    def is_call(self) -> bool:
        return self.kind != ""

    @property
    def frames(self) -> tuple[str, ...]:
        """The frames whose rows it works on."""
        match self.node:
            case g.Generate() | g.Infer():
                return (self.node.frame,)
            case g.Train() | g.Compute():
                return self.node.frames
            case g.Derive():
                return (self.node.frame,)
        return ()


@dataclass(frozen=True)
class Problem:
    """What to place, on what, and what is fixed."""

    graph: g.Graph  # the program
    jobs: tuple[Job, ...]  # in program order
    models: Mapping[str, Model]  # by name, without layouts; `train_layout` is "home" for trained models
    families: Mapping[str, Family]  # by model name
    cluster: Cluster  # with its rates
    memory: int  # bytes per device; 0: unknown
    lengths: Lengths = Lengths()  # expected tokens per prompt and response
    fixed: Mapping[int, FixedCall] = field(default_factory=dict)  # by job number

    @cached_property
    def tree(self) -> BlockTree:
        return BlockTree(self.cluster.nodes, self.cluster.gpus)

    @cached_property
    def train_index(self) -> Mapping[str, int]:
        """Model -> the index in `calls` of its first train call."""
        return {m: self.call_index[n] for m, n in self.first_train.items()}

    @property
    def world(self) -> int:
        return self.cluster.nodes * self.cluster.gpus

    @cached_property
    def calls(self) -> tuple[Job, ...]:
        return tuple(j for j in self.jobs if j.is_call)

    @cached_property
    def call_index(self) -> Mapping[int, int]:
        """Job number of a call -> its index in `calls`."""
        return {j.number: i for i, j in enumerate(self.calls)}

    @cached_property
    def fixed_blocks(self) -> tuple[Block, ...]:
        """The blocks of calls whose ranks the program fixes."""
        return tuple(f.block for _, f in sorted(self.fixed.items()) if f.block is not None)

    def blocks(self, job: Job, used: Sequence[Block]) -> Iterator[Block]:
        """Where a call may run, up to symmetry. used: the blocks of calls that are placed already; fixed blocks count
        as used before anything is placed."""
        fixed = self.fixed.get(job.number, FixedCall()).block
        return iter([fixed]) if fixed is not None else self.tree.distinct_blocks((*self.fixed_blocks, *used))

    @cached_property
    def logged_jobs(self) -> frozenset[int]:
        """The jobs that write the metrics of a step."""
        metrics = {v for _, v in self.graph.metrics}
        return frozenset(j.number for j in self.jobs if metrics.intersection(j.node.writes))

    @cached_property
    def frames(self) -> Mapping[str, IndexedFrame]:
        return {f.id: f for f in self.graph.frames}

    @cached_property
    def prompt_sources(self) -> Mapping[str, PromptSource]:
        """Frame -> where its prompts come from, as far as it is known."""
        return sources_of(g.nodes(self.graph.items), self.frames)

    @cached_property
    def values(self) -> dict[str, Value]:
        return {v.id: v for v in self.graph.values}

    @cached_property
    def programs(self) -> dict[str, Program]:
        return {p.id: p for p in self.graph.programs}

    @cached_property
    def first_train(self) -> Mapping[str, int]:
        """Model -> the job number of its first train call, whose layout its other train calls share."""
        found: dict[str, int] = {}
        for j in self.calls:
            if j.kind == "train":
                found.setdefault(j.model, j.number)
        return found

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Of each job, the jobs that precede it: those that write what it reads, and the earlier calls of its model
        that read the parameter version it replaces or write the version it reads."""
        def conflicts(i: Job, j: Job) -> bool:
            return i.is_call and i.model == j.model and "train" in (i.kind, j.kind)

        return tuple(tuple(sorted({*j.depends_on, *(i.number for i in self.jobs[: j.number] if conflicts(i, j))}))
                     for j in self.jobs)

    def steps_ahead(self, where: Sequence[frozenset[int]]) -> tuple[int, ...]:
        """By how many steps each job runs ahead of the others. where: the ranks of each job, or parts of them."""
        found = steps_ahead(self.graph, {j.node.id: where[j.number] for j in self.jobs})
        return tuple(found.get(j.node.id, 0) for j in self.jobs)

    @cached_property
    def may_run_ahead(self) -> frozenset[int]:
        """The numbers of the jobs that run ahead of others under some placement."""
        ids = self.graph.ahead | self.graph.may_run_ahead
        return frozenset(j.number for j in self.jobs if j.node.id in ids)

    @cached_property
    def length_readers(self) -> Mapping[int, tuple[int, ...]]:
        """Of each `generate`, the jobs that work on its rows, and so take part in the exchange of their lengths."""
        return {j.number: tuple(o.number for o in self.jobs if {*j.frames} & {*o.frames}) for j in self.jobs
                if j.kind == "generate"}

    def max_tokens(self, job: Job) -> int:
        """Tokens of its longest sequence, prompt and response."""
        return max((f.max_prompt_tokens + f.max_response_tokens for n in job.frames for f in (self.frames[n],)),
                   default=0)


def build_problem(placed: PlacedGraph, cluster: Cluster, lengths: Lengths = AT_MOST, memory: int = 0,
                  fixed: Mapping[str, FixedCall] | None = None) -> Problem:
    """placed: the program under any placement, for its models. fixed: by node id."""
    graph = placed.graph
    jobs = tuple(_build_jobs(graph))
    models = {m.name: replace(m, train_layout="home" if m.train_layout else "", ema_layout="") for m in placed.models}
    numbers = {j.node.id: j.number for j in jobs}
    by_number = {numbers[i]: f for i, f in (fixed or {}).items() if i in numbers}
    return Problem(graph, jobs, models, dict(placed.families), cluster, memory, lengths, by_number)


def _build_jobs(graph: g.Graph) -> Iterator[Job]:
    jobs = [(n, t) for n, t in _nodes_with_times(graph.items, 1.0)
            if isinstance(n, Call | g.Compute) or _calls_python(n)]
    uses = ValueUses(graph)
    numbers = {n.id: i for i, (n, _) in enumerate(jobs)}
    first = next((i for i, (n, _) in enumerate(jobs) if isinstance(n, Call)), 0)
    writers: dict[str, set[int]] = {}
    for node in g.nodes(graph.items):
        sources = set().union(*(writers.get(v, set()) for v in node.reads))
        i = numbers.get(node.id)
        for v in node.writes:
            writers[v] = {i} if i is not None else sources
        if i is None:
            continue
        anchor = uses.anchor(node) if isinstance(node, g.Compute | g.Derive) else node
        placed_with = numbers[anchor.id] if anchor is not None else first
        yield Job(i, node, KINDS.get(type(node), ""), getattr(node, "model", ""), jobs[i][1], tuple(sorted(sources)),
                  placed_with)


def _calls_python(node: g.Node) -> TypeGuard[g.Derive]:
    """Whether it derives rows by a user's function, which takes time; other derived rows are copies."""
    return isinstance(node, g.Derive) and DERIVE_OPS[node.op].calls_python


def _nodes_with_times(items: tuple[g.Item, ...], times: float) -> Iterator[tuple[g.Node, float]]:
    """(node, its runs per step on average) of all nodes."""
    for item in items:
        match item:
            case g.When():
                yield from _nodes_with_times(item.body, times / item.period if not item.first else 0.0)
            case g.Repeat():
                yield from _nodes_with_times(item.body, times * item.iterations)
            case g.Until() | g.Eval():
                yield from _nodes_with_times(item.body, times * item.max_iterations)
            case _:
                yield item, times
