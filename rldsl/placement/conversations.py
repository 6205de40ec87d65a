"""Where a `generate` can talk with an environment.

In: calls with their places. Out: nothing, or RL0333. A conversation lives on one rank, which owns its environment; dp
divides conversations among ranks. The train call and the inference on what was said may be divided in any way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.placement.model import Call, Place, label
from rldsl.placement.rules import option_span
from rldsl.plan.backends import described, no_conversations


def check_conversations(calls: Iterable[Call], places: Mapping[str, Place]) -> None:
    for node in calls:
        if not isinstance(node, g.Generate) or node.conversation is None:
            continue
        x, span = places[node.id].layout, places[node.id].span
        if why := no_conversations(x, described(x.backend)):
            option = next((d for d in ("tp", "pp", "ep") if getattr(x, d) > 1), "backend")
            raise fail("RL0333", f"`{label(node)}` cannot talk with an environment here", option_span(span, option), why,
                       help=f"place it with dp alone: `place {label(node)} on mesh(...) dp=...`; other calls may keep "
                            "their places")
