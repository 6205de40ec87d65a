"""Operators of a plan's arithmetic that relate rows to other rows, with torch.

In: a node of the family "rows", its arguments' values and the index of the ragged rows at hand. Out: its value.
Invariant: all siblings of a row are at hand (RL0538), so what a row gets depends on its parent's rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rldsl.plan.expr import Node
from rldsl.runtime.interpreter.expression_ops import discount, filled, last_of_each, neighbor, pad
from rldsl.runtime.interpreter.ragged_index import RaggedIndex


def evaluate_rows(node: Node, inner: Sequence[Node], args: Sequence[Tensor], ragged: RaggedIndex,
                  dtype: torch.dtype) -> Tensor:
    """The value of `node`. inner: the nodes of `args`."""
    if node.op == "over":
        return _over(node, inner[0], args[0], args[1], ragged)
    if node.op == "along":
        return _along(node, inner[0], args[0], args[1], ragged)
    space = inner[0].space
    frame = ragged.frames[next(f for f in ragged.frame_rows if ragged.frames[f].row_space == space)]
    parents, counts = (ragged.rows("seq", space) // frame.per_prompt).unique_consecutive(return_counts=True)
    if node.op == "last_row":
        at = torch.searchsorted(ragged.rows(node.level, node.space), parents)
        return args[0].new_zeros(ragged.size(node.level, node.space)).index_copy(0, at, last_of_each(args[0], counts))
    return SIBLINGS[node.op](args, counts).to(torch.bool if args[0].dtype == torch.bool else dtype)


def _at_last(args: Sequence[Tensor], counts: Tensor) -> Tensor:
    at = counts.cumsum(0) - 1
    return torch.zeros_like(args[0]).index_copy(0, at, args[0][at])


# args: values of rows, group after group; counts: rows of each group, at least one.
SIBLINGS: Mapping[str, Callable[[Sequence[Tensor], Tensor], Tensor]] = {
    "next_row": lambda args, counts: neighbor(args[0], counts.cumsum(0), counts, 1),
    "prev_row": lambda args, counts: neighbor(args[0], counts.cumsum(0), counts, -1),
    "cumsum_rows": lambda args, counts: pad(args[0].to(torch.float64), counts).cumsum(1)[filled(counts)],
    "discount_rows": lambda args, counts: discount(pad(args[0].to(torch.float64), counts),
                                                   args[1].to(torch.float64))[filled(counts)],
    "at_last_row": _at_last,
}


def _over(node: Node, of: Node, x: Tensor, default: Tensor, ragged: RaggedIndex) -> Tensor:
    """x of a selection as a value of all rows, which have the same numbers."""
    rows, selected = ragged.rows(node.level, node.space), ragged.rows(of.level, of.space)
    made = default.to(x.dtype).expand(rows.numel()).clone()
    return made.index_copy(0, torch.searchsorted(rows, selected), x)


def _along(node: Node, of: Node, x: Tensor, at: Tensor, ragged: RaggedIndex) -> Tensor:
    """For each token the value of the last prefix of its sequence with at most the tokens before it; 0 where there is
    none. x, at: [prefixes], ascending by sequence, then by position."""
    frame = str(node.attr("frame"))
    seq_of_token = ragged.index("token", frame, "seq")
    if not x.numel():
        return x.new_zeros(seq_of_token.numel())
    seq_of_prefix = ragged.index("seq", of.space, "seq", ragged.frames[frame].row_space)
    starts = ragged.ends(frame) - ragged.frame_rows[frame].lens
    place = starts[seq_of_prefix] + at.long()  # among the tokens of all sequences, so it ascends
    last = torch.searchsorted(place, torch.arange(seq_of_token.numel(), device=x.device), right=True) - 1
    own = (last >= 0) & (seq_of_prefix[last.clamp(min=0)] == seq_of_token)
    return torch.where(own, x[last.clamp(min=0)], 0)
