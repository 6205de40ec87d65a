"""Matrix products, biases and embeddings whose numbers do not depend on the batch, and their gradients.

In: tensors, and the groups of the tokens that are their rows. Out: what torch's functions give, but for rounding: rows
and columns are padded to multiples of ROWS and COLUMNS, so that a kernel adds the terms of every number in one order
(`invariant.py`), and gradients of weights are summed by groups (`row_groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels import fixed_order
from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.products import mkl_lacks_avx512, ordered_product
from rldsl.backends.torch.model.row_groups import RowGroups, sum_over_groups
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies

ROWS, COLUMNS = 4, 16  # a matrix product has whole multiples of both
HALF_PRODUCT = 1 << 12  # multiplications up to which torch uses another kernel in bfloat16


def pad_to_multiple(x: torch.Tensor, unit: int, dim: int = 0) -> torch.Tensor:
    """x, its size along `dim` padded with zeros to a multiple of `unit`."""
    missing = -x.shape[dim] % unit
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def multiply(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n, k] @ [k, m] -> [n, m]."""
    if fixed_order.needed(x):
        return fixed_order.products(x, right)
    if x.dtype != torch.float32 and _rounds_by_shape(x.device.type):
        # a product of two bfloat16 numbers is exact in float32, so only the order of the sums is another one
        return multiply(x.float(), right.float()).to(x.dtype)
    (count, size), width = x.shape, right.shape[1]
    if x.dtype == torch.float32 and mkl_lacks_avx512():
        # one row or one column has another order of sums, every other number the same
        few = count < ROWS or width < COLUMNS
        out = ordered_product(pad_to_multiple(x, ROWS) if count < ROWS else x,
                              pad_to_multiple(right.T, COLUMNS) if width < COLUMNS else right.T)
        return out[:count, :width] if few else out
    x, whole = pad_to_multiple(x, ROWS), width // COLUMNS * COLUMNS
    if x.dtype != torch.float32 and len(x) * size * COLUMNS <= HALF_PRODUCT:
        x = pad_to_multiple(x, HALF_PRODUCT // (size * COLUMNS) // ROWS * ROWS + ROWS)
    if whole == width:
        return torch.mm(x, right)[:count]
    rest = torch.mm(x, pad_to_multiple(right.T[whole:], COLUMNS).T)  # in the memory order of the other columns
    if not whole:
        return rest[:count, :width]
    return torch.cat([torch.mm(x, right[:, :whole]), rest[:, : width - whole]], 1)[:count]


@cache
def _rounds_by_shape(device: str) -> bool:
    """Whether kernels for products of bfloat16 numbers add in an order that depends on the shapes, as those of CPUs
    without AVX-512 do for the gradients of weights."""
    return device == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def weight_gradient(x: torch.Tensor, grad: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """x [n, k], grad [n, m] -> grad.T @ x [m, k]: that of a weight of a linear layer. Its rows and columns are padded
    where the rows of x and of grad are contiguous, so that a kernel sees them in one memory order. groups: of the rows;
    the gradient of several leaves is float32."""
    def part(rows: slice) -> torch.Tensor:
        return multiply(pad_to_multiple(grad[rows], ROWS, 1).T, x[rows])[: grad.shape[1]]

    total = sum_over_groups(groups or ((len(x),),), part, x.dtype)
    return x.new_zeros(grad.shape[1], x.shape[1]) if total is None else total


def sum_of_rows(x: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """[n, m] float32 -> [m]. torch's own sum of a column depends on the columns next to it. groups: as of
    `weight_gradient`."""
    groups = groups or ((len(x),),)
    total = sum_over_groups(groups, sums_of_groups(x, groups), x.dtype)
    return x.new_zeros(x.shape[1]) if total is None else total


def sums_of_groups(x: torch.Tensor, groups: RowGroups) -> Callable[[slice], torch.Tensor]:
    """(the rows of a group) -> the sum of these rows of x [n, m], whose storage is reused."""
    if x.device.type != "cpu" or fixed_order.needed(x):
        return lambda rows: multiply(x.new_ones(1, rows.stop - rows.start), x[rows])[0]
    # as rows of embeddings: one row after the other, all groups in one call
    sizes = [size for leaf in groups for size in leaf if size]
    at = torch.arange(len(sizes), device=x.device).repeat_interleave(torch.tensor(sizes, device=x.device))
    sums = torch.ops.aten.embedding_dense_backward(x, at, len(sizes), -1, False)
    place = {first: i for i, first in enumerate(accumulate(sizes[:-1], initial=0))}
    return lambda rows: sums[place[rows.start]]


class _Product(Function):
    """x [n, k] @ right [k, m]. read: `right`, as it multiplies, without a gradient: that of `right` is not rounded
    to its dtype where several leaves are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, right: torch.Tensor, read: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(x, read)
        ctx.groups = groups
        return multiply(x, read)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, read = ctx.saved_tensors
        grad_x = multiply(grad, read.T) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(grad, x, ctx.groups) if ctx.needs_input_grad[1] else None, None, None


def product(x: torch.Tensor, right: torch.Tensor, groups: RowGroups = (), read: torch.Tensor | None = None
            ) -> torch.Tensor:
    """[..., k] @ [k, m] -> [..., m]. groups: of the rows, in the gradient of `right`. read: a copy of `right` without
    gradient, in the dtype of products; None: made here."""
    if read is None:
        read = NO_COPIES.cast(right, product_dtype(x))
    out: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]).to(read.dtype), right, read, groups)
    return out.view(*x.shape[:-1], right.shape[1])


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """In which products of x multiply."""
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else x.dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, groups: RowGroups = (),
           copies: WeightCopies = NO_COPIES) -> torch.Tensor:
    """x: [..., k]; weight: [m, k]; bias: [m] -> [..., m]."""
    return add_bias(product(x, weight.T, groups, copies.cast(weight, product_dtype(x)).T), bias, groups)


def addmm(bias: torch.Tensor, x: torch.Tensor, right: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """bias: [m]; x: [n, k]; right: [k, m] -> [n, m]. Models whose weights are [in, out] use it (GPT-2)."""
    return add_bias(product(x, right, groups), bias, groups)


def matmul(x: torch.Tensor, right: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """Padded where the right side is a matrix or a vector; a batch of products has no tokens as its rows."""
    if right.dim() == 1:
        return product(x, right[:, None], groups)[..., 0]
    if right.dim() == 2:
        return product(x, right, groups)
    return fixed_order.products(x, right) if fixed_order.needed(x) and x.dim() > 2 else torch.matmul(x, right)


def add_bias(x: torch.Tensor, bias: torch.Tensor | None, groups: RowGroups = ()) -> torch.Tensor:
    """x: [..., m]; bias: [m] -> [..., m]."""
    if bias is None:
        return x
    out: torch.Tensor = _AddBias.apply(x, bias, groups)
    return out


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        ctx.groups = groups
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = sum_of_rows(grad.float().reshape(-1, grad.shape[-1]), ctx.groups)
        return grad, grad_bias, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int, groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.options = len(weight), padding, groups
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        rows, padding, groups = ctx.options
        at, flat = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
        return None, sum_over_groups(groups, lambda part: torch.ops.aten.embedding_dense_backward(
            flat[part], at[part], rows, padding, False), grad.dtype), None, None


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *rest: Any,
              groups: RowGroups = (), **options: Any) -> torch.Tensor:
    """Replaces `F.embedding` where gradients are summed by groups."""
    if sum(map(len, groups)) < 2:
        return F.embedding(ids, weight, padding_idx, *rest, **options)
    out: torch.Tensor = _Embedding.apply(ids, weight, -1 if padding_idx is None else padding_idx, groups)
    return out
