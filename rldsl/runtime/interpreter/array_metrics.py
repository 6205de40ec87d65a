"""Histograms and tables over all ranks that hold rows: the operators of `plan/arrays.py`.

In: the elements, or rows, that this rank holds. Out: the same numbers on every rank of the group. Invariant: they do
not depend on how rows are divided over ranks: a bin is found in float64 from bounds that all ranks agree on, and counts
are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.diag import present
from rldsl.plan.arrays import HISTOGRAM, ROWS
from rldsl.plan.expr import Node
from rldsl.runtime.collectives import all_reduce

# (node, row numbers [R]) -> [R, numbers of a row] float64: rows of a table with their tokens
RowNumbers = Callable[[Node, Tensor], Tensor]


def array(node: Node, elements: Tensor | None, rows: Tensor | None, group: Any,
          row_numbers: RowNumbers | None) -> Tensor:
    """[W] float64: the numbers of a node. elements: of its argument, where it has one, [S] for a column. rows: [S]
    int64, ascending: the rows of its frame at hand, for a table. group: the ranks that share the rows; None: this
    rank alone."""
    if node.op == HISTOGRAM and elements is not None:
        return _histogram(node, elements.to(torch.float64), group)
    rows = present(rows, "rows of the table", "run")
    chosen = _first(rows, int(node.attr("rows") or 0), group)
    mine = torch.isin(rows, chosen)
    if node.op == ROWS:
        own = present(row_numbers, "tokens of the table", "run")(node, rows[mine])
    else:
        own = present(elements, "column of the table", "run")[mine].to(torch.float64)[:, None]
    table = own.new_zeros(int(node.attr("rows") or 0), own.shape[1])
    if node.op == ROWS:  # no row has a number below 0
        table[len(chosen) :, 0] = -1.0 if group is None or dist.get_rank(group) == 0 else 0.0
    table[torch.searchsorted(chosen, rows[mine])] = own
    if group is not None:
        all_reduce(table, dist.ReduceOp.SUM, group)
    return table.flatten()


def _histogram(node: Node, x: Tensor, group: Any) -> Tensor:
    bins = int(node.attr("bins") or 0)
    low, high = _range(node, x, group)
    whole = x[~x.isnan()]
    inside = whole[(whole >= low) & (whole <= high)]
    place = ((inside - low) / (high - low) * bins).nan_to_num(0.0).floor().clamp(0, bins - 1).long()
    tail = [(whole < low).sum(), (whole > high).sum(), x.isnan().sum()]
    counts = torch.cat([torch.stack(tail), place.bincount(minlength=bins)])
    if group is not None:
        all_reduce(counts, dist.ReduceOp.SUM, group)
    return torch.cat([x.new_tensor([low, high]), counts.to(torch.float64)])


def _range(node: Node, x: Tensor, group: Any) -> tuple[float, float]:
    """That of the node, or else of the finite elements of all ranks. If they are equal, half of 1 around them, or half
    of their size where 1 is lost in rounding; without elements, 0 to 1."""
    if node.attr("low") is not None:
        return float(node.attr("low") or 0), float(node.attr("high") or 0)
    finite = x[x.isfinite()]
    ends = x.new_full((2,), -torch.inf)
    if finite.numel():
        ends = torch.stack([-finite.min(), finite.max()])
    if group is not None:
        all_reduce(ends, dist.ReduceOp.MAX, group)
    low, high = -float(ends[0]), float(ends[1])
    if low > high:
        return 0.0, 1.0
    if low < high:
        return low, high
    around = 0.5 if low - 0.5 < low < low + 0.5 else abs(low) / 2
    return low - around, low + around


def _first(rows: Tensor, most: int, group: Any) -> Tensor:
    """[R] int64, ascending: the first rows of all ranks, `most` at most."""
    own = rows[:most]
    if group is None:
        return own
    table = rows.new_zeros(dist.get_world_size(group), most)  # row + 1; 0: no row
    table[dist.get_rank(group), : len(own)] = own + 1
    all_reduce(table, dist.ReduceOp.SUM, group)
    found: Tensor = table[table > 0].sort().values
    return found[:most] - 1
