"""Where a model can keep to `invariant=true`: the same numbers for a token whatever is computed with it, and wherever.

In: calls with their places, and the families of their models where these are known. Out: nothing, or RL0330. dp, pp,
cp, ep, zero and recomputation leave each sum as it is; tp divides sums, which are cut into blocks
(`sharding/sum_blocks.py`), so its degree must divide their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call, Place, label
from rldsl.placement.rules import option_span
from rldsl.plan.backends import described
from rldsl.sharding.sum_blocks import BLOCKS, undividable


def check_invariance(graph: g.Graph, calls: Iterable[Call], places: Mapping[str, Place],
                     families: Mapping[str, Family]) -> None:
    """families: empty where no model directory has been read."""
    invariant_models = {m.name: m for m in graph.models if m.invariant}
    for node in calls:
        x, span = places[node.id].layout, places[node.id].span
        if node.model not in invariant_models:
            continue
        known, family = described(x.backend), families.get(node.model)
        if known is None or not known.invariant:
            raise fail("RL0330", f"`{label(node)}` cannot be invariant", option_span(span, "backend"),
                       f"the backend `{x.backend}` uses different kernels",
                       help=f"use `backend=torch`, or remove `invariant=true` from `{node.model}`")
        name, blocks = undividable(family.params, x.tp) or ("", 0) if family else ("", BLOCKS if BLOCKS % x.tp else 0)
        if blocks:
            label_text = f"tp={x.tp} does not divide the {blocks} blocks in which {name or 'a model'} is summed"
            raise fail("RL0330", f"`{label(node)}` cannot be invariant", option_span(span, "tp"), label_text,
                       help=f"use {_degrees(blocks)}, with more dp or pp, or remove `invariant=true` from "
                            f"`{node.model}`")


def _degrees(blocks: int) -> str:
    """The degrees that divide so many blocks."""
    *most, last = [f"tp={d}" for d in range(1, blocks + 1) if blocks % d == 0]
    return f"{', '.join(most)} or {last}" if most else last
