"""Models that exchange distributions know the same tokens.

In: a graph and families. Out: the graph, in which each `top` looks only at tokens that all readers of its ids know.
Models of one tokenizer often have output embeddings of different sizes, since rows are added that no token has.
Errors: RL0347 more tokens than there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.plan.heads import TOP


def with_known_tokens(graph: g.Graph, families: Mapping[str, Family]) -> g.Graph:
    """The graph with the number of tokens that each `top` looks at. Errors: RL0347."""
    widths = {v.id: v.width for v in graph.values}
    known: dict[str, int] = {}  # value of ids -> tokens that its maker and all of its readers know
    for node in g.nodes(graph.items):
        if isinstance(node, g.Infer | g.Train) and node.ids:
            words = families[node.model].vocab
            known[node.ids] = min(known.get(node.ids, words), words)
    for node in g.nodes(graph.items):
        if isinstance(node, g.Infer) and node.output_name == TOP and widths[node.ids] > known[node.ids]:
            raise Failure([Diagnostic(
                "RL0347", f"`k` is {widths[node.ids]}, but there are {known[node.ids]} tokens", node.span,
                f"of \"{families[node.model].path}\", and of the models that are asked for their log-probs",
                help="lower `k`: some tens of tokens have nearly all of the probability")])

    def limited(item: g.Item) -> g.Item:
        if isinstance(item, g.When | g.Repeat | g.Until | g.Eval):
            return replace(item, body=tuple(map(limited, item.body)))
        if isinstance(item, g.Infer) and item.output_name == TOP and known[item.ids] < families[item.model].vocab:
            return replace(item, words=known[item.ids])
        return item

    return replace(graph, items=tuple(map(limited, graph.items)))
