"""An assignment compiled and simulated: what its step takes and its ranks need, by the whole compiler.

In: a program and an assignment of its free calls. Out: a `Proved`. What is written to a file, and what a certificate
says, is this and no estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rldsl.clusters import Cluster
from rldsl.graph import model as g
from rldsl.memory.curve import peak
from rldsl.passes.pipeline import planned, run
from rldsl.placement.model import Place
from rldsl.placement.place import place_graph
from rldsl.plan.model import Plan
from rldsl.search.evaluator import Evaluation, Evaluator
from rldsl.search.prepared_program import PreparedProgram, known_families, places_of_assignment, with_places
from rldsl.simulate import Lengths, Timeline, simulate


@dataclass(frozen=True, slots=True)
class CompiledPlacement:
    """A placement and its plan. seconds: simulated. bytes: of the fullest rank, as the compiler counts."""

    judged: Evaluation
    places: dict[str, Place]
    plan: Plan
    timeline: Timeline
    bytes: int

    @property
    def seconds(self) -> float:
        return self.timeline.seconds


def compile_assignment(p: PreparedProgram, instance: Evaluator, judged: Evaluation, cluster: Cluster, lengths: Lengths) -> CompiledPlacement:
    """Raises Failure where the compiler refuses the placement."""
    a = judged.assignment
    names = [j.node.id for j in instance.calls]
    found = places_of_assignment(p, dict(zip(names, a.blocks, strict=True)), dict(zip(names, a.entries, strict=True)), judged.keep)
    plan, bytes = compile_program(with_places(p, found), known_families(p.placed))
    return CompiledPlacement(judged, found, plan, simulate(plan, cluster, lengths), bytes)


def compile_program(graph: g.Graph, describe: Callable[..., object]) -> tuple[Plan, int]:
    """The plan of a placed program, and bytes of its fullest rank."""
    plan, curves = planned(run(place_graph(graph, describe=describe)), "")  # type: ignore[arg-type]
    return plan, max(peak(c).bytes for c in curves)
