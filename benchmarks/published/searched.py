"""What the search finds on the hardware of a published row, with its certified gap, and why it is faster. All modelled.

In: a row. Out: a line of the table in docs/published.md. Memory is that of our own runtime, which holds the state of
training and of generation at the same time; so a row that a system runs by unloading one of them may not fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.prediction import Prediction, cluster_of, lengths_of, make_model, sets_of
from benchmarks.published.rows import LOG_STD, Row
from rldsl import api
from rldsl.models.families import describe
from rldsl.plan.events import Generate, Infer, Offload, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.search import Options, find_placement, prepare_program, unless_locked
from rldsl.search.space import Strategy
from rldsl.simulate import Timeline

WORDS = {"actor.generate": "generation", "actor.logprobs": "log-probabilities",
         "ref.logprobs": "those of the reference", "actor.train": "training"}
HEAD = ("| run | published layout, predicted | searched, predicted | certified gap | what changes |\n"
        "|---|---|---|---|---|")


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call of a plan."""

    strategy: Strategy  # how it runs
    ranks: tuple[int, int]  # the first, and one more than the last
    seconds: float  # simulated, that the slowest rank spends in it

    def overlaps(self, other: PlacedCall) -> bool:
        return self.ranks[0] < other.ranks[1] and other.ranks[0] < self.ranks[1]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a search."""

    seconds: float  # simulated, of a step
    gap: float  # certified
    calls: Mapping[str, PlacedCall]  # by name


def search(row: Row, folder: Path, seconds: float, lag: int = 0, log_std: float = LOG_STD) -> Found:
    """seconds: of CPU time, after which the search ends. Raises Failure where nothing fits."""
    make_model(folder, row.model)
    cluster = cluster_of(row)
    memory = int(cluster.memory_gb * 1e9)
    graph = api.build_graph(api.read_source(f"{row.program}.rlf"), sets_of(row) | {"lag": lag,
                                                                                   "memory": cluster.memory_gb})
    p = prepare_program(graph, "", cluster, memory, unless_locked(graph, ()), describe)
    begin = time.process_time()
    answer = find_placement(p, cluster, memory, Options(
        lengths=lengths_of(row, log_std), should_continue=lambda _: time.process_time() - begin < seconds))
    best = answer.best[0]
    return Found(best.seconds, answer.gap, placed_calls(best.plan, best.timeline))


def placed_calls(plan: Plan, timeline: Timeline) -> dict[str, PlacedCall]:
    """The calls of a plan, by name."""
    seconds, layouts = timeline.event_seconds(), {x.id: x for x in plan.layouts}
    meshes = {m.id: m for m in plan.meshes}
    offloaded = {(e.model, e.layout) for e, _ in event_paths(plan) if isinstance(e, Offload)}
    found = {}
    for e, _ in event_paths(plan):
        if isinstance(e, Generate | Infer | Train):
            x, ranks = layouts[e.layout], meshes[e.mesh].ranks
            strategy = Strategy(x.dp, x.tp, x.pp, x.cp, x.ep, x.zero, e.mbs,
                                isinstance(e, Train) and e.recompute == "full", (e.model, e.layout) in offloaded, x.vpp,
                                0 if isinstance(e, Generate) else e.mbt)
            found[e.display_name] = PlacedCall(strategy, (ranks[0][0], ranks[-1][1]), seconds.get(e.id, 0.0))
    return found


def line(p: Prediction, found: Found) -> str:
    """A row of the table. p: of the published placement."""
    before = placed_calls(p.plan, p.timeline)
    return (f"| `{p.row.name}` | {p.seconds:.1f} s | {found.seconds:.1f} s | {found.gap:.2%} | "
            f"{'; '.join(changes(before, found.calls, p.row)) or 'nothing by half a second'} |")


def changes(before: Mapping[str, PlacedCall], after: Mapping[str, PlacedCall], row: Row) -> Iterator[str]:
    """How each call differs from the published placement, and what that is good for; without calls that take as long
    as before, to half a second."""
    for name in (n for n in WORDS if n in after):
        old, now = before[name], after[name]
        size, where = now.ranks[1] - now.ranks[0], ""
        if size != old.ranks[1] - old.ranks[0]:
            where = f" on {size} of {row.gpus} devices"
        if abs(now.seconds - old.seconds) < 0.5 and not where:
            continue
        why = list(reasons(name, row.most, before, after))
        yield (f"{WORDS[name]} with `{now.strategy.text()}`{where} instead of `{old.strategy.text()}`, "
               f"{now.seconds:.0f} s instead of {old.seconds:.0f} s{': ' if why else ''}{', '.join(why)}")


def reasons(name: str, longest: int, before: Mapping[str, PlacedCall],
            after: Mapping[str, PlacedCall]) -> Iterator[str]:
    """What makes a call, or the step around it, faster. longest: tokens of a row."""
    old, now = before[name], after[name]
    a, b = old.strategy, now.strategy
    if name.endswith("generate"):
        parts = a.tp * a.pp * a.ep, b.tp * b.pp * b.ep
        if parts[1] > parts[0]:
            before_it = f"one in {parts[0]}" if parts[0] > 1 else "all"
            yield f"a device reads one part in {parts[1]} of the weights in each step instead of {before_it}"
        return
    apart = [WORDS[k] for k, c in after.items() if k != name and not k.endswith("generate")
             and not c.overlaps(now) and before[k].overlaps(old)]
    if apart:
        yield f"at the same time as {' and '.join(apart)}"
    if b.tp < a.tp:
        yield "fewer all-reduces" if b.tp > 1 else "no all-reduces in the layers"
    if b.ep < a.ep:
        yield "tokens travel less far to their experts" if b.ep > 1 else "tokens do not travel to their experts"
    if a.recompute and not b.recompute:
        yield "no forward pass is made twice"
    if b.offload and not a.offload:
        yield "others have its memory while they run"
    if b.pp < a.pp:
        yield "fewer stages that wait for each other"
    if b.vpp > a.vpp:
        yield "a pipeline of chunks fills sooner"
    if not b.mbs and not b.mbt and b.pp == 1 and (a.mbs or a.mbt):
        yield "all rows in one pass"
    elif (b.mbt or b.mbs * longest) > (a.mbt or a.mbs * longest) > 0:
        yield "fewer and larger passes"
