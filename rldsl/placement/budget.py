"""Micro-batches by tokens: what `mbt` must be at least, and what it means where tokens are not there yet.

In: calls with their places, and the frames that they work on. Out: nothing, or RL0328; the most sequences that a
`generate` decodes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rldsl.diag import fail
from rldsl.graph import model as g
from rldsl.placement.model import Call, Placement, label
from rldsl.placement.rules import option_span
from rldsl.plan.spaces import IndexedFrame


def max_row_tokens(frame: IndexedFrame) -> int:
    """Tokens of a row, at most."""
    return frame.max_prompt_tokens + frame.max_response_tokens


def check_token_budgets(graph: g.Graph, calls: Iterable[Call], placements: Mapping[str, Placement]) -> None:
    """A row is never cut, so the longest must fit."""
    frames = {f.id: f for f in graph.frames}
    for node in calls:
        placement = placements[node.id]
        wide = sum(max_row_tokens(frames[f]) for f in (node.frames if isinstance(node, g.Train) else (node.frame,)))
        if 0 < placement.mbt < wide:
            raise fail("RL0328", f"a row of `{label(node)}` can exceed its micro-batch limit",
                       option_span(placement.span, "mbt"), f"a row has up to {wide} tokens",
                       help=f"use `mbt={wide}` or more, or limit the rows (`max_prompt_tokens`, `max_answer_tokens`, "
                            "`max_new_tokens`)")


def decode_batch_size(frame: IndexedFrame, placement: Placement) -> int:
    """`mbs` of a generate: by `mbt` as many sequences as fit when all are as long as they may be."""
    fit = placement.mbt // max_row_tokens(frame)
    return min(placement.mbs or fit, fit) if placement.mbt else placement.mbs
