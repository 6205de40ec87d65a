"""The dataflow of a program as a networkx graph: what depends on what, within a step and from step to step.

In: a Graph. Out: a `MultiDiGraph` whose nodes are the ids of the graph's nodes, in program order, and whose edges are
values (key: the value) and parameter versions (key: the model, attribute `version`). An edge is `carried` where it
comes from the step before: a model's first calls of a step read what the last train or sync of the step before made,
and a state or a buffer that is read before it is written is as the step before left it.
Without carried edges the graph has no cycle.

networkx takes a while to import; this module is imported only for a picture or an order, and not by
`rlc check`.
"""

from __future__ import annotations

import networkx as nx

from rldsl.graph import model as g


def dataflow(graph: g.Graph) -> nx.MultiDiGraph[str]:
    """Node attribute `node`: the record."""
    made: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    every = list(g.nodes(graph.items))
    made.add_nodes_from((n.id, {"node": n}) for n in every)
    final = {value: n.id for n in every for value in n.writes}  # value -> what writes it last in a step
    writer: dict[str, str] = {}  # the same, so far in the step: a state or a buffer may be written several times
    for n in every:
        for value in n.reads:
            if value in writer or value in final and value not in n.writes:
                made.add_edge(writer.get(value, final[value]), n.id, key=value, version=False,
                              carried=value not in writer)
        writer |= dict.fromkeys(n.writes, n.id)
    last = {n.model: n.id for n in every if isinstance(n, g.Train | g.Sync)}
    current: dict[str, str] = {}  # model -> what made its version, so far in the step
    for n in every:
        for model in models_read(n):
            if model in last:
                made.add_edge(current.get(model, last[model]), n.id, key=model, version=True,
                              carried=model not in current)
        if isinstance(n, g.Train | g.Sync):
            current[n.model] = n.id
    return made


def models_read(node: g.Node) -> tuple[str, ...]:
    """The models whose parameters a node reads."""
    if isinstance(node, g.Generate | g.Infer | g.Train | g.Save):
        return (node.model,)
    if isinstance(node, g.Sync):
        return (node.source, node.model) if node.decay else (node.source,)
    return ()


def within_step(graph: nx.MultiDiGraph[str]) -> nx.DiGraph[str]:
    """What must come before what in one step: an acyclic graph of the same nodes."""
    step: nx.DiGraph[str] = nx.DiGraph()
    step.add_nodes_from(graph)
    step.add_edges_from((a, b) for a, b, data in graph.edges(data=True) if not data["carried"])
    return step


def reduced(graph: nx.MultiDiGraph[str]) -> nx.MultiDiGraph[str]:
    """The transitive reduction within a step; edges from step to step stay."""
    needed = set(nx.transitive_reduction(within_step(graph)).edges)
    kept: nx.MultiDiGraph[str] = nx.MultiDiGraph()
    kept.add_nodes_from(graph.nodes(data=True))
    for a, b, key, data in graph.edges(keys=True, data=True):
        if data["carried"] or (a, b) in needed:
            kept.add_edge(a, b, key=key, **data)
    return kept
