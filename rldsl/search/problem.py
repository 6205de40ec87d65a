"""What is to be placed: the calls of a step, who waits for whom, and what there is to run them on.

In: a graph and its models' families, a cluster, expected lengths. Out: a `Problem`. Calls and computations are jobs, in
program order; a job inside blocks runs as often in a step as these say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from rldsl.clusters import Cluster
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Placed, label
from rldsl.placement.place import Flow
from rldsl.plan.expr import Program
from rldsl.plan.model import Frame, Model
from rldsl.search.space import Block, Kind, Strategy, Tree
from rldsl.simulate.lengths import AT_MOST, Lengths


@dataclass(frozen=True, slots=True)
class FixedCall:
    """What the program says of a call that the search does not change. block: its ranks, None where it chooses them.
    options: those that are given, by name."""

    block: Block | None = None
    strategy: Strategy | None = None
    options: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """kind: "" of a computation. times: of a step. after: the jobs that write what this one reads, of the same step.
    lead: of a computation, the call whose ranks it takes; of another, itself."""

    number: int
    node: g.Node
    kind: Kind | str
    model: str
    times: float
    after: tuple[int, ...]
    lead: int

    @property
    def name(self) -> str:
        return label(self.node)

    @property
    def call(self) -> bool:
        return self.kind != ""

    @property
    def frames(self) -> tuple[str, ...]:
        """Whose rows it works on."""
        match self.node:
            case g.Generate() | g.Infer():
                return (self.node.frame,)
            case g.Train() | g.Compute():
                return self.node.frames
        return ()


@dataclass(frozen=True)
class Problem:
    """models: without layouts; `home` is "home" where it is trained. memory: bytes of a device, 0: unknown."""

    graph: g.Graph
    jobs: tuple[Job, ...]
    models: Mapping[str, Model]
    families: Mapping[str, Family]
    cluster: Cluster
    memory: int
    lengths: Lengths = Lengths()
    fixed: Mapping[int, FixedCall] = field(default_factory=dict)

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.cluster.nodes, self.cluster.gpus)

    @property
    def world(self) -> int:
        return self.cluster.nodes * self.cluster.gpus

    @cached_property
    def calls(self) -> tuple[Job, ...]:
        return tuple(j for j in self.jobs if j.call)

    @cached_property
    def logged(self) -> frozenset[int]:
        """The jobs that make what a step logs."""
        shown = {v for _, v in self.graph.metrics}
        return frozenset(j.number for j in self.jobs if shown.intersection(j.node.writes))

    @cached_property
    def frames(self) -> Mapping[str, Frame]:
        return {f.id: f for f in self.graph.frames}

    @cached_property
    def programs(self) -> dict[str, Program]:
        return {p.id: p for p in self.graph.programs}

    @cached_property
    def homes(self) -> Mapping[str, int]:
        """Model -> the first of its train calls; the others run under its layout."""
        found: dict[str, int] = {}
        for j in self.calls:
            if j.kind == "train":
                found.setdefault(j.model, j.number)
        return found

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Of each job, the jobs that come before it: those that write what it reads, and of the calls of its model
        those that use the version that it ends, or make the one that it uses."""
        return tuple(tuple(sorted({*j.after, *(i.number for i in self.jobs[: j.number] if i.call and i.model == j.model
                                               and "train" in (i.kind, j.kind))})) for j in self.jobs)

    @cached_property
    def told(self) -> Mapping[int, tuple[int, ...]]:
        """Of each `generate`, the jobs that work on its rows, which are told their lengths."""
        return {j.number: tuple(o.number for o in self.jobs if {*j.frames} & {*o.frames}) for j in self.jobs
                if j.kind == "generate"}

    def tokens(self, job: Job) -> int:
        """Of the longest sequence."""
        return max((f.max_prompt_tokens + f.max_response_tokens for n in job.frames for f in (self.frames[n],)),
                   default=0)


def build_problem(placed: Placed, cluster: Cluster, lengths: Lengths = AT_MOST, memory: int = 0,
            fixed: Mapping[str, FixedCall] | None = None) -> Problem:
    """placed: the program under any placement at all, for its models. fixed: by node."""
    graph = placed.graph
    jobs = tuple(_build_jobs(graph))
    models = {m.name: replace(m, home="home" if m.home else "", mean="") for m in placed.models}
    numbers = {j.node.id: j.number for j in jobs}
    kept = {numbers[i]: f for i, f in (fixed or {}).items() if i in numbers}
    return Problem(graph, jobs, models, dict(placed.families), cluster, memory, lengths, kept)


def _build_jobs(graph: g.Graph) -> Iterator[Job]:
    every = [(n, t) for n, t in _nodes_with_times(graph.items, 1.0) if isinstance(n, Call | g.Compute)]
    flow = Flow({v: n for n in g.nodes(graph.items) for v in n.writes}, tuple(g.nodes(graph.items)))
    numbers = {n.id: i for i, (n, _) in enumerate(every)}
    first = next((i for i, (n, _) in enumerate(every) if isinstance(n, Call)), 0)
    writers: dict[str, set[int]] = {}
    for node in g.nodes(graph.items):
        sources = set().union(*(writers.get(v, set()) for v in node.reads))
        i = numbers.get(node.id)
        for v in node.writes:
            writers[v] = {i} if i is not None else sources
        if i is None:
            continue
        near = flow.first_train(node) or flow.source(node) if isinstance(node, g.Compute) else node
        lead = numbers[near.id] if near is not None else first
        kind = {g.Generate: "generate", g.Infer: "infer", g.Train: "train"}.get(type(node), "")
        yield Job(i, node, kind, getattr(node, "model", ""), every[i][1], tuple(sorted(sources)), lead)


def _nodes_with_times(items: tuple[g.Item, ...], times: float) -> Iterator[tuple[g.Node, float]]:
    """Every node with how often a step runs it, on the average."""
    for item in items:
        match item:
            case g.Every():
                yield from _nodes_with_times(item.body, times / item.period)
            case g.Repeat():
                yield from _nodes_with_times(item.body, times * item.times)
            case g.Until() | g.Eval():
                yield from _nodes_with_times(item.body, times * item.most)
            case _:
                yield item, times
