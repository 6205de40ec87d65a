"""Whether a model has positions for the sequences that it is given.

In: calls, their places, and the families of their models. Out: nothing, or RL0331. A model with a table of positions
has no row to read beyond its last, and a backend may compute no more positions than the config states. Rotary positions
have no end, but some scalings stretch those of all sequences next to a long one, so that a loss would depend on the
micro-batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rldsl.diag import Diagnostic, Failure
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.budget import max_row_tokens
from rldsl.placement.model import Call, Placement, label
from rldsl.plan.backends import described

LIMIT = "limit them (`max_prompt_tokens`, `max_answer_tokens`, `max_new_tokens`)"
CHANGING = ("dynamic", "longrope")  # in transformers' names; the others are one function of the position


def check_positions(graph: g.Graph, calls: Iterable[Call], placements: Mapping[str, Placement],
                    families: Mapping[str, Family]) -> None:
    """RL0331, once for each model. families: empty where no model directory has been read."""
    frames = {f.id: f for f in graph.frames}
    problems: dict[str, Diagnostic] = {}
    for node in calls:
        family = families.get(node.model)
        if family is None or node.model in problems:
            continue
        backend = placements[node.id].layout.backend
        known = described(backend)
        limits = (max_positions(family), known.positions(family) if known else 0)
        if not any(limits):
            continue
        most = min(x for x in limits if x)
        own = [frames[f] for f in (node.frames if isinstance(node, g.Train) else (node.frame,))]
        frame = max(own, key=max_row_tokens)
        if max_row_tokens(frame) > most:
            problems[node.model] = Diagnostic(
                "RL0331",
                f"`{label(node)}` has sequences of up to {max_row_tokens(frame)} tokens, but the model has {most} "
                "positions",
                node.span, f"{frame.max_prompt_tokens} + {frame.max_response_tokens} tokens",
                help=_help(family, most) if most == limits[0] else
                f"{LIMIT}; `backend={backend}` has no more positions, `backend=torch` continues beyond them")
    if problems:
        raise Failure(problems.values())


def max_positions(family: Family) -> int:
    """Tokens of a sequence, at most; 0: any number."""
    ropes = _rope_configs(family)
    changing = [int(r.get("original_max_position_embeddings") or family.max_positions) for r in ropes
                if r.get("rope_type") in CHANGING]
    return min(changing, default=0 if ropes else family.max_positions)


def _rope_configs(family: Family) -> list[Mapping[str, Any]]:
    """One, or one for each kind of layer."""
    found = json.loads(dict(family.config).get("rope_parameters", "null"))
    if not isinstance(found, dict):
        return []
    return [found] if "rope_type" in found else [x for x in found.values() if isinstance(x, dict)]


def _help(family: Family, most: int) -> str:
    changing = sorted({str(r["rope_type"]) for r in _rope_configs(family) if r.get("rope_type") in CHANGING})
    return LIMIT if not changing else \
        f"{LIMIT}; beyond {most} tokens the scaling `{changing[0]}` depends on the longest sequence of the micro-batch"
