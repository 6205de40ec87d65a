"""Whether the backend that a layout names supports what the layout needs.

In: a name as written; calls with their places, and the families of their models where these are known. Out: nothing,
or RL0312 no such backend, RL0326 one whose package is not installed, or in another version, RL0327 a feature that it
cannot express.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from rldsl.diag import Diagnostic, Failure, Fix, present
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Placement, label
from rldsl.placement.rules import option_span
from rldsl.plan.backends import described, how_to_install, lacking, names, unable, unfit
from rldsl.plan.model import DEFAULT_BACKEND
from rldsl.source import Span


def check_backend_name(name: str, span: Span) -> None:
    """RL0312."""
    if described(name) is None:
        near = get_close_matches(name, names(), n=1)
        raise Failure([Diagnostic(
            "RL0312", f"unknown backend `{name}`", span, "unknown backend",
            help=f"did you mean `backend={near[0]}`?" if near else f"backends: {', '.join(names())}",
            fix=Fix(((span, f"backend={near[0]}"),)) if near and span.text.startswith("backend") else None)])


def check_backends(graph: g.Graph, calls: Iterable[Call], placements: Mapping[str, Placement],
                   families: Mapping[str, Family]) -> None:
    """RL0327, and RL0326 where a backend could do it all. families: empty where no model directory has been read."""
    adapted = {m.name for m in graph.models if m.lora is not None}
    optimizers = {m.name: m.optimizer for m in graph.models}
    kinds = {g.Generate: "generate", g.Infer: "infer", g.Train: "train"}
    problems: list[Diagnostic] = []
    for node in calls:
        placement = placements[node.id]
        x, family = placement.layout, families.get(node.model)
        known = present(described(x.backend), f"description of the backend `{x.backend}`", str(placement.span or x.id))
        talks = isinstance(node, g.Generate) and node.conversation is not None
        entries = isinstance(node, g.Infer | g.Train) and node.ids != ""
        why = unable(known, kinds[type(node)], x, node.model in adapted, optimizers[node.model], talks, entries,
                     isinstance(node, g.Train) and node.first_pass != "",
                     isinstance(node, g.Generate) and node.per_step > 0, placement.waiting,
                     isinstance(node, g.Train) and node.router_bias_update_rate > 0)
        if not why and family is not None:
            why = known.problem(family, x) or (
                "it does not read images" if family.reads_images and not known.images else "")
        span = option_span(placement.span, "backend")
        if why:
            problems.append(Diagnostic("RL0327", f"`{label(node)}` cannot run on the backend `{x.backend}`", span, why,
                                       help=f"use `backend={DEFAULT_BACKEND}`, or remove the unsupported feature"))
        elif lacking(known):
            problems.append(Diagnostic("RL0326", f"the backend `{x.backend}` cannot be used", span,
                                       unfit(known) or "its package is not installed",
                                       help=f"install it with {how_to_install(known)}, or write "
                                            f"`backend={DEFAULT_BACKEND}`"))
    if problems:
        raise Failure(dict.fromkeys(problems))
