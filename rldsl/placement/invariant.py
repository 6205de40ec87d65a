"""Where a model can keep to `invariant=true`: the same numbers for a token whatever is computed with it.

In: calls with their places, and the families of their models where these are known. Out: nothing, or RL0330. dp, pp,
zero and recomputation leave each product as it is; tp, cp and ep make a sum of parts, in an order of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Place, label
from rldsl.placement.rules import option_span
from rldsl.plan.backends import described

FIXED = ("tp", "cp", "ep")


def check_invariance(graph: g.Graph, calls: Iterable[Call], places: Mapping[str, Place],
                     families: Mapping[str, Family]) -> None:
    """families: empty where no model directory has been read."""
    invariant_models = {m.name: m for m in graph.models if m.invariant}
    for m in invariant_models.values():
        family = families.get(m.name)
        if m.dtype != "float32" or family is not None and family.experts:
            why = f"its dtype is {m.dtype}" if m.dtype != "float32" else ("its experts process tokens of different "
                                                                          "sequences together")
            raise fail("RL0330", f"`{m.name}` cannot be invariant", m.span, why,
                       help="`invariant=true` supports only dense models in float32")
    for node in calls:
        x, span = places[node.id].layout, places[node.id].span
        if node.model not in invariant_models:
            continue
        degree = next((d for d in FIXED if getattr(x, d) > 1), "")
        known = described(x.backend)
        if degree:
            raise fail("RL0330", f"`{label(node)}` cannot be invariant", option_span(span, degree),
                       f"{degree}={getattr(x, degree)} changes the order in which partial sums are added",
                       help=f"use only dp, pp and zero for `{node.model}`, or remove `invariant=true`")
        if known is None or not known.invariant:
            raise fail("RL0330", f"`{label(node)}` cannot be invariant", option_span(span, "backend"),
                       f"the backend `{x.backend}` uses different kernels",
                       help=f"use `backend=torch`, or remove `invariant=true` from `{node.model}`")
