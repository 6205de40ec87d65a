"""Whether models whose router biases a `train` moves have such biases.

In: a graph and families. Out: nothing, or RL0334.
"""

from __future__ import annotations

from collections.abc import Mapping

from rldsl.diag import Diagnostic, Failure, Label
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.plan.router_bias import why_none


def check_router_biases(graph: g.Graph, families: Mapping[str, Family]) -> None:
    """RL0334: a train call with `router_bias_update_rate` of a model without router biases that it could move."""
    models = {m.name: m for m in graph.models}
    problems = []
    for node in g.nodes(graph.items):
        if not isinstance(node, g.Train) or not node.router_bias_update_rate:
            continue
        model, family = models[node.model], families[node.model]
        if why := why_none(f"{family.name} models", family.params, model.lora is not None):
            problems.append(Diagnostic(
                "RL0334", f"`{node.model}` has no router biases to update", node.span, why,
                (Label(model.span, f'the model in "{family.path}"'),),
                help="leave out `router_bias_update_rate`: it is for models whose routers choose experts with a bias, "
                     "such as DeepSeek-V3 and GLM-4.5, without adapters"))
    if problems:
        raise Failure(dict.fromkeys(problems))
