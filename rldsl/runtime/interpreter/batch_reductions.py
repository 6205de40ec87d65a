"""Reductions to batch level: the partial result of a rank, and the result of all ranks.

In: the elements of a rank. Out: a number that does not depend on how elements are divided over ranks: sums and means
are exact (`exact_sums.py`), and NaN on one rank is NaN on all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rldsl.diag import internal_error
from rldsl.plan.expr import Node
from rldsl.plan.operators import OPERATORS
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.interpreter.exact_sums import exact_sum, exact_words


def reduces_to_batch(node: Node) -> bool:
    """Whether a node has one value for all elements."""
    return node.attr("to") == "batch"


def partial_result(op: str, x: Tensor) -> Tensor:
    """This rank's partial result of `op`: the sum, the number, the maximum, or minus the minimum of its elements."""
    wide = x.to(torch.float64)
    match op:
        case "count":
            return wide.new_full((), float(wide.numel()))
        case "sum" | "mean":
            return wide.sum()
        case "amax" | "amin":
            wide = wide if op == "amax" else -wide
            return wide.max() if wide.numel() else wide.new_full((), -torch.inf)
    raise internal_error(f"the interpreter cannot reduce with {op} to batch")


def is_extreme(op: str) -> bool:
    """Whether results of ranks combine by their maximum (a minimum is negated)."""
    return OPERATORS[op].combine in ("max", "min")


def extremum(op: str, maximum: Tensor) -> Tensor:
    """The result of amax or amin from the maximum of all partial results."""
    return maximum if op == "amax" else -maximum


def marked_nan(x: Tensor) -> Tensor:
    """[..., 2]: x with -inf for NaN, and a mark of what was NaN. A maximum over ranks keeps both; of NaN and a number,
    it may be either (gloo compares)."""
    is_nan = x.isnan()
    return torch.stack((x.masked_fill(is_nan, -torch.inf), torch.where(is_nan, 1.0, -torch.inf)), -1)


def unmarked_nan(marked: Tensor) -> Tensor:
    """What `marked_nan` took apart."""
    x, mark = marked.unbind(-1)
    return x.masked_fill(mark > 0, torch.nan)


def all_reduced(op: str, x: Tensor, group: Any) -> Tensor:
    """The reduction over the elements of all ranks of `group`: exact, so that it does not depend on their division."""
    if is_extreme(op):
        marked = marked_nan(torch.stack((partial_result(op, x), partial_result("count", x))))
        if group is not None:
            all_reduce(marked, dist.ReduceOp.MAX, group)
        value, count = unmarked_nan(marked).unbind()
        return torch.where(count > 0, extremum(op, value), 0.0)
    if op not in ("count", "sum", "mean"):
        raise internal_error(f"the interpreter cannot reduce with {op} to batch")
    counted = torch.tensor([x.numel()], device=x.device)
    words = counted if op == "count" else torch.cat([exact_words(x), counted])
    if group is not None:
        all_reduce(words, dist.ReduceOp.SUM, group)
    *_, count = words.tolist()
    total = float(count) if op == "count" else exact_sum(words[:-1])
    return torch.tensor(total / max(count, 1) if op == "mean" else total, dtype=torch.float64, device=x.device)


def gathered(x: Tensor, group: Any) -> Tensor:
    """The elements of all ranks, on each of them: every rank writes its own into a table of zeros, which are summed."""
    if group is None:
        return x
    counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=x.device)
    index = dist.get_rank(group)
    counts[index] = x.numel()
    all_reduce(counts, dist.ReduceOp.SUM, group)
    start = int(counts[:index].sum())
    table = x.new_zeros(int(counts.sum()))
    table[start : start + x.numel()] = x
    all_reduce(table, dist.ReduceOp.SUM, group)
    return table
