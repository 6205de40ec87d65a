"""What a program will cost: the time of its calls on a cluster, and the memory of a rank in each.

In: a `Question`: a text, saved or not, the open texts that it may import, and the machines to assume. Out: a
`Forecast`. Compiles, so it reads model directories and takes seconds: for a separate process (worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rldsl.clusters import Cluster, find
from rldsl.diag import Failure, fail
from rldsl.graph import model as g
from rldsl.graph.build import build, read_text
from rldsl.graph.lag import with_lag
from rldsl.memory.curve import Curve, peak, points
from rldsl.plan.events import ModelCall
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse


@dataclass(frozen=True, slots=True)
class Question:
    """What the language server asks its worker."""

    path: str                                               # of the program
    text: str                                               # of the program
    texts: Mapping[str, str] = field(default_factory=dict)  # path -> an open text that differs from the file
    cluster: str = ""                                       # a file or a preset; "": none


@dataclass(frozen=True, slots=True)
class CallCost:
    """The forecast for one call."""

    at: str         # "LINE:COLUMN" of the call, from 1
    name: str       # "actor.generate"
    seconds: float  # the longest that a rank spends in it in a step; -1: not known
    bytes: int      # the most that a rank holds on its device meanwhile


@dataclass(frozen=True, slots=True)
class Forecast:
    """The worker's answer."""

    calls: tuple[CallCost, ...] = ()  # in the order of the program
    seconds: float = -1.0             # of a step, with sequences at their maximum length; -1: not known
    tokens_per_second: float = 0.0    # of a step; 0: not known
    peak: int = 0                     # bytes on the rank that needs most
    memory: int = 0                   # bytes of a device; 0: not known
    machine: str = ""                 # name of the cluster
    lag: str = ""                     # what the lag, or one of a step, gains or loses; "": not known
    why: str = ""                     # why there is no answer, or why a part of it is missing; "": complete
    average: float = -1.0             # seconds of a step, with what runs in every K-th step; -1: not known


def forecast(question: Question) -> Forecast:
    """The forecast; a program that cannot be compiled has only a `why`."""
    read = reader(question.texts)
    try:
        file = parse(SourceFile(question.path, question.text))
        graph, memory, plan, curves = _planned(file, read)
    except Failure as failure:
        return Forecast(why=failure.diagnostics[0].title)
    held = Forecast(_calls(plan, curves, {}), peak=max(peak(c).bytes for c in curves), memory=memory)
    try:
        cluster = machine(file, graph.cluster, question.cluster)
        found = _timed(held, plan, curves, cluster)
    except Failure as failure:
        return replace(held, why=failure.diagnostics[0].title)
    return replace(found, lag=_lag(file, read, plan, cluster, found.average))


def _planned(file: ast.File, read: Callable[[str], str]) -> tuple[g.Graph, int, Plan, tuple[Curve, ...]]:
    """The graph, the memory of a device, the plan, and the memory of each class of ranks. Errors: of a compilation."""
    from rldsl.passes.pipeline import planned, run
    from rldsl.placement.place import place_graph

    graph = build(file, {}, None, read)
    placed = place_graph(graph)
    return graph, placed.memory, *planned(run(placed), "rldsl")


def _lag(file: ast.File, read: Callable[[str], str], plan: Plan, cluster: Cluster, seconds: float) -> str:
    """What the lag, or one of a step where generation has its own ranks, gains or loses; "" where there is nothing
    to compare with. seconds: of a step, on average."""
    from rldsl.simulate import simulate
    from rldsl.simulate.summary import OtherLag, lag_verdict, may_overlap

    lag, other = plan.header.lag, int(not plan.header.lag)
    if other and not may_overlap(plan):
        return ""
    try:
        *_, changed, curves = _planned(with_lag(file, other), read)
        late = OtherLag(other, simulate(changed, cluster).average, max(peak(c).bytes for c in curves))
    except Failure:  # with a lag the program is wrong, or does not fit
        return ""
    return f"lag {lag}: {lag_verdict(lag, seconds, late)}"


def reader(texts: Mapping[str, str]) -> Callable[[str], str]:
    """Files as the editor has them, else as they are saved."""
    from pathlib import Path

    def read(path: str) -> str:
        open_ = texts.get(str(Path(path).resolve()))
        return read_text(path) if open_ is None else open_

    return read


def machine(file: ast.File, declared: g.Cluster | None, setting: str) -> Cluster:
    """The cluster that the program names; where it does not say how fast it is, the devices of the setting, as many as
    the program says. Errors: those of reading a cluster, RL0215 where neither says anything."""
    path = next((i.path for i in file.items if isinstance(i, ast.Cluster)), None)
    named = find(path) if path else None
    if named is None and not setting:
        raise fail("RL0215", "no cluster with known speeds (set rlf.cluster)")
    if named is None or named.unknown() and setting:
        named = find(setting)
    return named if declared is None else replace(named, nodes=declared.nodes, gpus=declared.gpus)


def _timed(held: Forecast, plan: Plan, curves: tuple[Curve, ...], cluster: Cluster) -> Forecast:
    """Errors: RL0096 a cluster that is too small, RL0215 one that does not say how fast it is."""
    from rldsl.simulate import simulate

    found = simulate(plan, cluster)
    memory = held.memory or int(cluster.memory_gb * 1e9)
    return replace(held, calls=_calls(plan, curves, found.event_seconds()), seconds=found.seconds,
                   average=found.average, memory=memory, tokens_per_second=found.tokens_per_second,
                   machine=cluster.name)


def _calls(plan: Plan, curves: tuple[Curve, ...], seconds: Mapping[int, float]) -> tuple[CallCost, ...]:
    """Calls by their places; what is written once and runs as several events counts together."""
    held: dict[int, int] = {}
    for point in (p for c in curves for p in points(c)):
        held[point.event] = max(held.get(point.event, 0), point.during)
    found: dict[tuple[str, str], CallCost] = {}
    for event in (e for e, _ in event_paths(plan) if isinstance(e, ModelCall)):
        at, name = ":".join(event.at.rsplit(":", 2)[1:]), event.display_name
        before = found.get((at, name), CallCost(at, name, 0.0 if seconds else -1.0, 0))
        found[at, name] = CallCost(at, name, before.seconds + seconds.get(event.id, 0.0),
                                   max(before.bytes, held.get(event.id, 0)))
    return tuple(found.values())
