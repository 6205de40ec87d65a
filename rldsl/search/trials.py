"""What a setting needs, by compiling it.

In: a `Placed`, and settings of its calls. Out: the bytes that a rank needs at most. What is tried goes through the
whole of placement and passes, so that what is said to fit is what the user gets who follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rldsl.diag import Failure
from rldsl.graph import model as g
from rldsl.memory import curves
from rldsl.memory.curve import peak
from rldsl.models.families import Family
from rldsl.passes.emit import emit
from rldsl.passes.pipeline import run
from rldsl.placement.model import Call, Placed
from rldsl.placement.place import place_graph
from rldsl.progress import listening, stage
from rldsl.search.settings import Setting, clause
from rldsl.source import Span


class Trials:
    """placed: the program, as it was placed first."""

    def __init__(self, placed: Placed):
        self._placed, self._places = placed, dict(placed.places)
        self.families = dict(placed.families)
        self.calls = [n for n in g.nodes(placed.graph.items) if isinstance(n, Call)]
        self.old: Setting = {n.id: self._places[n.id] for n in self.calls}
        self._known: dict[tuple[object, ...], int | None] = {}

    def bytes(self, setting: Setting, nodes: int = 0) -> int | None:
        """What a rank needs at most; None where the placement is not possible. nodes: of a cluster; 0: as it is."""
        key = (nodes, *((i, replace(p, span=None, why="")) for i, p in setting.items()))
        if key not in self._known:
            stage("trying placements that need less memory", detail=f"{len(self._known)} tried")
            with listening(lambda _: None):  # the passes of a trial are no stages of the command
                self._known[key] = self._bytes(setting, nodes)
        return self._known[key]

    def _bytes(self, setting: Setting, nodes: int) -> int | None:
        graph = self._graph(setting, nodes)
        if graph is None:
            return None
        try:
            plan = emit(run(place_graph(graph, describe=self._describe)), "")
        except Failure:
            return None
        return max(peak(c).bytes for c in curves(plan))

    def _describe(self, path: str, kind: str, span: Span | None = None, trained: bool = False) -> Family:
        return next(self.families[m.name] for m in self._placed.graph.models
                    if (m.path, m.kind, m.optimizer is not None) == (path, kind, trained))

    def _graph(self, setting: Setting, nodes: int) -> g.Graph | None:
        """The same program with every place written at its call; None where one cannot be written."""
        graph = self._placed.graph
        clauses: dict[str, g.Clause | None] = {}
        for n in g.nodes(graph.items):
            said = setting.get(n.id, self._places.get(n.id))
            if said is None or n.id not in setting and said.why.startswith("default"):
                clauses[n.id] = None
            else:
                clauses[n.id] = clause(said, n.span, mesh_only=n.id not in setting)
                if clauses[n.id] is None:
                    return None
        cluster = replace(graph.cluster, nodes=nodes) if nodes and graph.cluster else graph.cluster
        items = _mapped(graph.items, lambda n: replace(n, clause=clauses[n.id]))
        return replace(graph, rules=(), cluster=cluster, items=items)


def _mapped(items: tuple[g.Item, ...], change: Callable[[g.Node], g.Node]) -> tuple[g.Item, ...]:
    return tuple(change(i) if isinstance(i, g.Node) else replace(i, body=_mapped(i.body, change)) for i in items)
