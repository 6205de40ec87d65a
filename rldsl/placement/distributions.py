"""Models that exchange distributions know the same tokens.

In: a graph and families. Out: the graph, in which each `top` looks only at tokens that all readers of its ids know.
Models of one tokenizer often have output embeddings of different sizes, since rows are added that no token has.
Errors: RL0347 more tokens than there are, RL0349 whole distributions that cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Placement, label
from rldsl.placement.sync import sync_sources
from rldsl.plan.heads import DISTRIBUTION, TOP


def with_hidden_sizes(graph: g.Graph, families: Mapping[str, Family]) -> g.Graph:
    """The graph, whose values that are whole distributions say how wide hidden states are. Errors: RL0349, for models
    that cannot be compared."""
    models = {m.name: m for m in graph.models}
    made: dict[str, str] = {}  # value -> the model that made it
    for node in g.nodes(graph.items):
        if isinstance(node, g.Infer) and node.output_name == DISTRIBUTION:
            made[node.value] = node.model
            if _has_biased_head(families[node.model]):
                raise Failure([Diagnostic(
                    "RL0349", f"the whole distributions of `{node.model}` cannot be compared", node.span,
                    "its output embedding has a bias, which its hidden states do not show",
                    help=f"compare its most likely tokens: `t = {node.model}.top(..., k=64)`, then `t.logprobs`")])
        elif isinstance(node, g.Derive):
            made |= {new: made[old] for old, new in node.values if old in made}
        elif isinstance(node, g.Train):
            for _, other in node.heads:
                mine, theirs = families[node.model].vocab, families[other].vocab
                changed = models[other].optimizer is not None or sync_sources(graph, other)
                if mine != theirs or changed:
                    why = f"`{node.model}` has {mine} tokens, and `{other}` {theirs}" if mine != theirs else \
                        f"`{other}` changes during the run"
                    raise Failure([Diagnostic(
                        "RL0349", f"the whole distributions of `{node.model}` and `{other}` cannot be compared",
                        node.span, why, help=f"compare its most likely tokens: `t = {other}.top(gen, k=64)`, then "
                                             "`t.logprobs`")])
    return replace(graph, values=tuple(
        replace(v, width=families[made[v.id]].hidden) if v.id in made else v for v in graph.values))


def _has_biased_head(family: Family) -> bool:
    """Whether the output embedding adds a number to each logit, as Phi's does."""
    return any(p.stage == "last" and p.shape == (family.vocab,) for p in family.params)


def check_heads(graph: g.Graph, placements: Mapping[str, Placement]) -> None:
    """RL0349: the head of a model whose distributions a loss compares is read where the student is trained."""
    makers = [n for n in g.nodes(graph.items) if isinstance(n, g.Infer) and n.output_name == DISTRIBUTION]
    for node in g.nodes(graph.items):
        heads = {other for _, other in node.heads} if isinstance(node, g.Train) else set()
        for maker in (m for m in makers if m.model in heads):
            mine, theirs = placements[node.id], placements[maker.id]
            a, b = mine.layout, theirs.layout
            same = (a.dp, a.tp, a.pp, a.cp, a.ep, a.backend) == (b.dp, b.tp, b.pp, b.cp, b.ep, b.backend)
            if mine.mesh.ranks != theirs.mesh.ranks or not same:
                degrees = " ".join(f"{d}={getattr(a, d)}" for d in ("dp", "tp", "pp", "cp") if getattr(a, d) > 1)
                raise Failure([Diagnostic(
                    "RL0349", f"`{label(maker)}` is not placed as `{label(node)}` is", theirs.span,
                    "whole distributions are compared where both models are, divided alike",
                    help=f"place it on the same ranks{f' with {degrees}' if degrees else ''}; or compare its most "
                         f"likely tokens, which travel: `t = {maker.model}.top(gen, k=64)`")])


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
