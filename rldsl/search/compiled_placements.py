"""Placements that are compiled: their plan, the memory of their ranks, and the simulated time of their step.

In: a program and a setting, or an assignment of its free calls. Out: bytes, or a `CompiledPlacement`. What a placement
file, its certificate and a piece of advice claim comes from here, through all of placement and passes, and not from an
estimate; so a user who follows advice gets what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rldsl.clusters import Cluster
from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.memory.curve import peak
from rldsl.passes.pipeline import memory_bound, planned, run
from rldsl.placement.model import Call, PlacedGraph, Placement
from rldsl.placement.place import Describe, place_graph
from rldsl.plan.model import Plan
from rldsl.progress import listening, stage
from rldsl.search.evaluator import Evaluation, Evaluator
from rldsl.search.prepared_program import PreparedProgram, placements_of_assignment, with_placements
from rldsl.search.settings import Setting, clause, known_families, with_clauses
from rldsl.simulate import Lengths, Timeline, simulate


@dataclass(frozen=True, slots=True)
class CompiledPlacement:
    """A placement that the search found, compiled."""

    evaluation: Evaluation  # the estimate that the search chose it by
    placements: dict[str, Placement]  # of the calls that were free, by node id
    plan: Plan  # the plan
    timeline: Timeline  # simulated
    bytes: int  # peak of the fullest rank, as the compiler counts

    @property
    def seconds(self) -> float:
        """Simulated seconds of a step."""
        return self.timeline.seconds


def compile_program(graph: g.Graph, describe: Describe) -> tuple[Plan, int]:
    """(plan, peak bytes of its fullest rank) of a program with a clause at every call. Raises Failure where the
    compiler refuses the placement."""
    return compile_placed(place_graph(graph, describe=describe))


def compile_placed(placed: PlacedGraph) -> tuple[Plan, int]:
    """The same of a program that has been placed."""
    plan, curves = planned(run(placed), "")
    return plan, max(peak(c).bytes for c in curves)


def compile_assignment(p: PreparedProgram, evaluator: Evaluator, found: Evaluation, cluster: Cluster,
                       lengths: Lengths) -> CompiledPlacement:
    """Raises Failure where the compiler refuses the placement."""
    a = found.assignment
    ids = [j.node.id for j in evaluator.calls]
    blocks, candidates = dict(zip(ids, a.blocks, strict=True)), dict(zip(ids, a.candidates, strict=True))
    placements = placements_of_assignment(p, blocks, candidates, found.keeps_copies)
    plan, bytes = compile_program(with_placements(p, placements), known_families(p.placed))
    return CompiledPlacement(found, placements, plan, simulate(plan, cluster, lengths), bytes)


class SettingCompiler:
    """The memory that settings of one program need, cached."""

    def __init__(self, placed: PlacedGraph):
        """placed: the program under its first placement."""
        self._placed, self._placements = placed, dict(placed.placements)
        self.families = dict(placed.families)
        self.calls = [n for n in g.nodes(placed.graph.items) if isinstance(n, Call)]
        self.first: Setting = {n.id: self._placements[n.id] for n in self.calls}
        self._bytes: dict[tuple[object, ...], int | None] = {}
        self._bounds: dict[tuple[object, ...], int | None] = {}

    def bytes(self, setting: Setting, nodes: int = 0) -> int | None:
        """Peak bytes of the fullest rank; None where the placement is impossible. nodes: of the cluster; 0: as it
        is."""
        if (key := _key(setting, nodes)) not in self._bytes:
            self._bytes[key] = self._tried(setting, nodes, lambda placed: compile_placed(placed)[1])
        return self._bytes[key]

    def bound(self, setting: Setting, nodes: int = 0) -> int | None:
        """A lower bound of `bytes`, found faster; None where that is None."""
        if (key := _key(setting, nodes)) not in self._bounds:
            self._bounds[key] = self._tried(setting, nodes, memory_bound)
        return self._bounds[key]

    def fits(self, setting: Setting, limit: int, nodes: int = 0) -> bool:
        """Whether no rank needs more than `limit` bytes."""
        for needed in (self.bound, self.bytes):
            size = needed(setting, nodes)
            if size is None or size > limit:
                return False
        return True

    def _tried(self, setting: Setting, nodes: int, needed: Callable[[PlacedGraph], int]) -> int | None:
        stage("trying placements that need less memory", detail=f"{len(self._bounds)} tried")
        with listening(lambda _: None):  # the passes of a trial are no stages of the command
            graph = self._graph(setting, nodes)
            if graph is None:
                return None
            try:
                return needed(place_graph(graph, describe=known_families(self._placed)))
            except Failure:
                return None

    def _graph(self, setting: Setting, nodes: int) -> g.Graph | None:
        """The program with a clause at every node that does not follow another; None where no clause can name its
        ranks."""
        graph = self._placed.graph
        clauses: dict[str, g.Clause | None] = {}
        for n in g.nodes(graph.items):
            placement = setting.get(n.id, self._placements.get(n.id))
            if placement is None or n.id not in setting and placement.why.startswith("default"):
                clauses[n.id] = None
                continue
            clauses[n.id] = clause(placement, n.span, mesh_only=n.id not in setting)
            if clauses[n.id] is None:
                return None
        cluster = replace(graph.cluster, nodes=nodes) if nodes and graph.cluster else graph.cluster
        return replace(with_clauses(graph, clauses), cluster=cluster)


def _key(setting: Setting, nodes: int) -> tuple[object, ...]:
    """Equal for settings that need the same."""
    return nodes, *((i, replace(p, span=None, why="")) for i, p in setting.items())
