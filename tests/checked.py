"""`rlc check` of a graph, as a test wants it: nothing, or what is wrong as an exception."""

from __future__ import annotations

from rldsl.diag import Failure
from rldsl.graph.model import Graph
from rldsl.placement.place import problems_of


def check_graph(graph: Graph) -> None:
    if found := problems_of(graph):
        raise Failure(found)
