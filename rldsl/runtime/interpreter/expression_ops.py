"""One node of a plan's arithmetic on ragged batches, with torch.

In: a node of `plan/expr.py`, its arguments' values and the index of the ragged rows at hand. Out: its value.
Invariant: a value of level token is flat [sum of lens], entry is [sum of lens * width], token by token, seq is [S],
prompt has one entry for each distinct prompt id in ascending order, batch has no dimension. What one sequence gets
never depends on the others. An empty set of elements has sum, mean, amax, amin, median and quantile 0; NaN among the
elements makes a reduction NaN, as in torch. Everything is differentiable where the mathematics is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from rldsl.diag import internal_error
from rldsl.plan.expr import LEVELS, Level, Node
from rldsl.plan.operators import in_family
from rldsl.runtime.interpreter.ragged_index import RaggedIndex


def evaluate(node: Node, inner: Sequence[Node], args: Sequence[Tensor], ragged: RaggedIndex,
             dtype: torch.dtype) -> Tensor:
    """The value of `node`, which is neither an input nor a Python function nor a reduction to batch.

    inner: the nodes of `args`. dtype: of all numbers; those of level batch are float64."""
    dtype = torch.float64 if node.level == "batch" else dtype
    if node.op == "const":
        value = cast("float | bool", node.attr("value"))
        # a kernel that writes the number; `torch.tensor` would copy it from the host and wait
        return torch.full((), value, dtype=torch.bool if isinstance(value, bool) else dtype, device=ragged.device)
    if in_family(node.op, "elementwise"):
        return elementwise(node.op, [broadcast(a, n, node, ragged) for a, n in zip(args, inner, strict=True)], dtype)
    if node.attr("to") is not None:
        return reduce(node, inner[0], args, ragged, dtype)
    if in_family(node.op, "order"):
        wide, within = args[0].to(torch.float64), cast(Level, node.attr("within"))
        index = torch.zeros(wide.numel(), dtype=torch.int64, device=wide.device) if within == "batch" else \
            ragged.index(inner[0].level, inner[0].space, within, str(node.attr("of")))
        if node.op == "across":
            return _across(wide, index, ragged.frame_rows[inner[0].space].lens).to(dtype)
        return ordered(node.op, wide, index).to(dtype)
    return sequence(node, str(node.attr("frame") or inner[0].space), args, ragged, dtype)


def float_type(inputs: Mapping[str, Tensor]) -> torch.dtype:
    """The widest float type of the inputs, of those with elements if there are any; float32 without one."""
    dtypes = [x.dtype for x in inputs.values() if x.is_floating_point() and x.dim()]
    dtypes = dtypes or [x.dtype for x in inputs.values() if x.is_floating_point()] or [torch.float32]
    widest = dtypes[0]
    for other in dtypes[1:]:
        widest = torch.promote_types(widest, other)
    return widest


def as_number(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in `dtype`; truth values stay as they are."""
    return x if x.dtype == torch.bool else x.to(dtype)


def input_value(node: Node, inputs: Mapping[str, Tensor], ragged: RaggedIndex, dtype: torch.dtype) -> Tensor:
    """The value of an input node, which must have one number for each element at hand; of batch level, in float64."""
    x = inputs[str(node.attr("name"))]
    if node.level == "batch":
        return as_number(x.reshape(()), torch.float64)
    size = ragged.size(node.level, node.space)
    if x.shape != (size,):
        raise internal_error(f"input {node.attr('name')}: shape {tuple(x.shape)}, {size} {node.level} elements", "run")
    return as_number(x, dtype)


# ------------------------------------------------------------------------------------------------ elementwise


def broadcast(x: Tensor, of: Node, to: Node, ragged: RaggedIndex) -> Tensor:
    """x of a coarser level, repeated for every element of a finer one."""
    if (of.level, of.space) == (to.level, to.space) or of.level == "batch":
        return x
    if LEVELS.index(of.level) > LEVELS.index(to.level):
        raise internal_error(f"{of.level} does not broadcast to {to.level}", "run")
    return x[ragged.index(to.level, to.space, of.level, of.space)]


_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "pow": torch.pow,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt, "abs": torch.abs, "min": torch.minimum,
    "max": torch.maximum, "expm1": torch.expm1, "log1p": torch.log1p, "sigmoid": torch.sigmoid,
    "logsigmoid": functional.logsigmoid,
}
_TRUTHS: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
}


def elementwise(op: str, args: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """An operator on arguments of one shape or none."""
    if op == "stop_gradient":
        return args[0].detach()
    if op in _TRUTHS:
        return _TRUTHS[op](*args)
    if op == "where":
        chosen, other = _alike(args[1:], dtype)
        return torch.where(truth(args[0]), chosen, other)
    if op in ("eq", "ne"):
        return _NUMBERS[op](*_alike(args, dtype))
    return _NUMBERS[op](*(a.to(dtype) for a in args))


def truth(x: Tensor) -> Tensor:
    return x if x.dtype == torch.bool else x != 0


def _alike(args: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Truth values stay when all are; otherwise everything is a number."""
    return list(args) if all(a.dtype == torch.bool for a in args) else [a.to(dtype) for a in args]


# ------------------------------------------------------------------------------------------------- reductions


def reduce(node: Node, of: Node, args: Sequence[Tensor], ragged: RaggedIndex, dtype: torch.dtype) -> Tensor:
    """A reduction to a level finer than batch. of: the node of the first of `args`. Sums run in float64, so that the
    order of the elements hardly matters."""
    x = args[0]
    index = ragged.index(of.level, of.space, node.level, node.space)
    size = ragged.size(node.level, node.space)
    wide = x.to(torch.float64)
    count = torch.zeros(size, dtype=torch.float64, device=x.device).index_add(0, index, torch.ones_like(wide))
    match node.op:
        case "count":
            return count.to(dtype)
        case "sum" | "mean":
            total = torch.zeros_like(count).index_add(0, index, wide)
            return (total / count.clamp(min=1) if node.op == "mean" else total).to(dtype)
        case "amax" | "amin":
            worst = torch.full_like(count, -torch.inf if node.op == "amax" else torch.inf)
            best = worst.scatter_reduce(0, index, wide, node.op)
            return torch.where(count > 0, best, 0.0).to(dtype)
        case op if op in _SEGMENTS:
            return _SEGMENTS[op](wide, index, count.long(), args[1:]).to(dtype)
        case op:
            raise internal_error(f"the interpreter cannot reduce with {op} by {node.level}")


def _medians(x: Tensor, index: Tensor, counts: Tensor, args: Sequence[Tensor]) -> Tensor:
    """[segments] from x [elements] and the segment of each element; 0 for an empty segment."""
    low, high, worst = _at_places(x, index, counts, ((counts - 1) // 2, counts // 2, counts - 1))
    return torch.where(worst.isnan(), worst, (low + high) / 2)


def _quantiles(x: Tensor, index: Tensor, counts: Tensor, args: Sequence[Tensor]) -> Tensor:
    """[segments]: as `_quantile` of each segment; 0 for an empty one."""
    at = _share(args[0]) * (counts - 1).clamp(min=0)
    below = at.nan_to_num().floor().long()
    low, high, worst = _at_places(x, index, counts, (below, torch.minimum(below + 1, counts - 1), counts - 1))
    found = _between(low, high, at - below)
    return torch.where(counts > 0, torch.where(worst.isnan(), worst, found), 0.0)


def _share(share: Tensor) -> Tensor:
    """The share of a quantile; NaN outside [0, 1], where no element lies. What is outside by rounding alone, such as a
    schedule that ends at 1, is 0 or 1."""
    share = share.to(torch.float64)
    inside = share.clamp(0, 1)
    return torch.where((share - inside).abs() <= 1e-6, inside, torch.nan)


def _at_places(x: Tensor, index: Tensor, counts: Tensor, places: Sequence[Tensor]) -> list[Tensor]:
    """Of each segment its elements at some places of their order, in which NaN comes last; 0 for an empty one."""
    order = x.argsort()
    ordered = torch.cat((x[order[index[order].argsort(stable=True)]], x.new_zeros(1)))  # by segment, then by value
    starts = counts.cumsum(0) - counts
    return [ordered[torch.where(counts > 0, starts + place, x.numel())] for place in places]


def _between(low: Tensor, high: Tensor, part: Tensor) -> Tensor:
    """Linear interpolation; inf - inf would be NaN."""
    found = torch.where((part == 0) | (low == high), low, low + part * (high - low))
    return torch.where(part.isnan(), torch.nan, found)


def of_all_elements(op: str, x: Tensor, args: Sequence[Tensor]) -> Tensor:
    """A reduction to batch with `Operator.combine` "gather". x: float64, the elements of all ranks. args: the further
    arguments of the node. Returns a number; 0 if there are no elements."""
    if op not in _WHOLE.keys() | _SEGMENTS.keys():
        raise internal_error(f"the interpreter cannot reduce with {op} to batch")
    if not x.numel():
        return x.new_zeros(())
    if op in _WHOLE:
        return _WHOLE[op](x, args)
    one = torch.zeros(x.numel(), dtype=torch.int64, device=x.device)
    return _SEGMENTS[op](x, one, one.new_full((1,), x.numel()), args)[0]


def _median(x: Tensor, args: Sequence[Tensor]) -> Tensor:
    return _quantile(x, (x.new_full((), 0.5),))


def _quantile(x: Tensor, args: Sequence[Tensor]) -> Tensor:
    """args: the share. NaN if an element is NaN, or the share is not in [0, 1]."""
    ordered = x.sort().values  # NaN after all numbers
    at = _share(args[0]) * (ordered.numel() - 1)
    below = at.nan_to_num().floor().long()
    between = _between(ordered[below], ordered[(below + 1).clamp(max=ordered.numel() - 1)], at - below)
    return torch.where(ordered[-1].isnan(), torch.nan, between)


# Reductions with `Operator.combine` "gather". By segment: x [elements] float64, the segment of each element, the number
# of elements in each segment, and the further arguments -> [segments], 0 for an empty one. To batch the same function
# is used, with one segment, unless the operator has a faster one in _WHOLE.
_SEGMENTS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], Tensor]] = {
    "median": _medians,
    "quantile": _quantiles,
}
_WHOLE: Mapping[str, Callable[[Tensor, Sequence[Tensor]], Tensor]] = {"median": _median, "quantile": _quantile}


# ----------------------------------------------------------------------------------------------------- orders


def ordered(op: str, x: Tensor, segment: Tensor) -> Tensor:
    """An operator of the family "order". x: [elements] float64. segment: of each element; orders are inside segments.
    NaN comes last; its rank is NaN."""
    by_value = x.argsort(stable=True)
    order = by_value[segment[by_value].argsort(stable=True)]  # by segment, then by value
    if op == "sort":
        return torch.zeros_like(x).index_copy(0, segment.argsort(stable=True), x[order])
    if op != "rank":
        raise internal_error(f"the interpreter has no order {op}")
    if not x.numel():
        return torch.zeros_like(x)
    value, own = x[order].detach(), segment[order]
    place = torch.arange(x.numel(), device=x.device)
    starts = torch.cat((own.new_ones(1), own.diff())) != 0  # of segments
    equals = starts | torch.cat((starts[:1], value[1:] != value[:-1]))  # of runs of equal elements
    run, first = equals.cumsum(0) - 1, place[equals]
    size = torch.cat((first[1:], place[-1:] + 1)) - first
    begin = place[starts][starts.cumsum(0) - 1]  # of the segment of each
    ranks = (first[run] - begin).to(x.dtype) + (size[run] - 1) / 2
    return torch.empty_like(ranks).index_copy(0, order, torch.where(value.isnan(), torch.nan, ranks))


def _across(x: Tensor, prompt: Tensor, lens: Tensor) -> Tensor:
    """x: [tokens] float64. prompt: of each token. lens: tokens of each response. -> [tokens], for each the sum over the
    tokens of its prompt at its position."""
    if not x.numel():
        return x
    position = torch.arange(x.numel(), device=x.device) - (lens.cumsum(0) - lens).repeat_interleave(lens)
    place = prompt * (position.max() + 1) + position
    return x.new_zeros(int(place.max()) + 1).index_add(0, place, x)[place]


# -------------------------------------------------------------------------------------------------- sequences


def sequence(node: Node, frame: str, args: Sequence[Tensor], ragged: RaggedIndex, dtype: torch.dtype) -> Tensor:
    """The operators that work inside each sequence of `frame`."""
    of_turns = node.level == "turn"
    lens = ragged.turn_counts(frame) if of_turns else ragged.frame_rows[frame].lens
    match node.op:
        case "len":
            return lens.to(dtype)
        case "prompt_len":
            prompt_lens = ragged.frame_rows[frame].prompt_lens
            if prompt_lens is None:
                raise internal_error(f"the prompt lengths of {frame} are not at hand", "run")
            return prompt_lens.to(dtype)
        case "index":
            return (ragged.frame_rows[frame].rows % ragged.frames[frame].per_prompt).to(dtype)
        case "at_end":
            return _at_end(args[0], frame, ragged)
        case "last":
            return _last(args[0], frame, ragged)
        case "next" | "prev":
            ends = lens.cumsum(0) if of_turns else ragged.ends(frame)
            return neighbor(args[0], ends, lens, 1 if node.op == "next" else -1)
        case "cumsum":
            return pad(args[0].to(torch.float64), lens).cumsum(1)[filled(lens)].to(dtype)
        case "discount":
            return discount(pad(args[0].to(torch.float64), lens), args[1].to(torch.float64))[filled(lens)].to(dtype)
        case "discount_by":
            x, g = (pad(a.to(torch.float64), lens) for a in args)
            return discount_by(x, g)[filled(lens)].to(dtype)
        case op:
            raise internal_error(f"the interpreter has no sequence operator {op}")


def neighbor(x: Tensor, ends: Tensor, lens: Tensor, shift: int) -> Tensor:
    """Each token's neighbor; 0 (or false) at the border of its sequence."""
    # an empty sequence writes to an extra element at the end, which is cut off: selecting others would synchronize
    border = torch.where(lens > 0, ends - 1 if shift == 1 else ends - lens, x.numel())
    inside = torch.ones(x.numel() + 1, dtype=torch.bool, device=x.device).index_fill(0, border, False)[:-1]
    return torch.where(inside, x.roll(-shift), torch.zeros_like(x))


def _at_end(x: Tensor, frame: str, ragged: RaggedIndex) -> Tensor:
    size = ragged.size("token", frame)
    at = torch.where(ragged.frame_rows[frame].lens > 0, ragged.ends(frame) - 1, size)  # empty: the extra element
    return x.new_zeros(size + 1).index_copy(0, at, x)[:-1]


def _last(x: Tensor, frame: str, ragged: RaggedIndex) -> Tensor:
    return last_of_each(x, ragged.frame_rows[frame].lens)


def last_of_each(x: Tensor, lens: Tensor) -> Tensor:
    """The last of each of `lens` elements of x, [sum of lens]; 0 where there is none."""
    at = torch.where(lens > 0, lens.cumsum(0) - 1, x.numel())
    return torch.cat((x, x.new_zeros(1)))[at]


def filled(lens: Tensor) -> Tensor:
    """[S, longest] bool: where a table with one sequence in each row holds a token."""
    longest = int(lens.max()) if lens.numel() else 0
    return torch.arange(longest, device=lens.device) < lens[:, None]


def pad(x: Tensor, lens: Tensor) -> Tensor:
    """Flat [sum of lens] -> [S, longest], zeros after each sequence."""
    holds = filled(lens)
    return x.new_zeros(holds.shape).masked_scatter(holds, x)


def discount(x: Tensor, g: Tensor) -> Tensor:
    """y[:, t] = x[:, t] + g * y[:, t+1] for x of [S, L] and one number g, in log2(L) vector steps: after step k, y sums
    the next 2**k terms, so y + g**(2**k) * (y shifted by 2**k) sums twice as many (Hillis & Steele 1986)."""
    shift = 1
    while shift < x.shape[1]:
        x = x + g * functional.pad(x[:, shift:], (0, shift))
        g, shift = g * g, 2 * shift
    return x


def discount_by(x: Tensor, g: Tensor) -> Tensor:
    """y[:, t] = x[:, t] + g[:, t] * y[:, t+1] for x and g of [S, L], as `discount`: after step k, g has the products of
    2**k factors."""
    shift = 1
    while shift < x.shape[1]:
        x = x + g * functional.pad(x[:, shift:], (0, shift))
        g, shift = g * functional.pad(g[:, shift:], (0, shift)), 2 * shift
    return x
