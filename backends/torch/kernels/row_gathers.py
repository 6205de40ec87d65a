"""Rows in another order, and rows that are repeated, with gradients that are gathers, too.

In: rows, and which of them to take. Out: these rows. The gradient of torch's own indexing sorts the indices and adds
what belongs to one row, since it cannot know that there is one of each, or equally many; on a GPU that is slower than
the product of matrices after it. On a CPU it is not, and torch's is used.
"""

from __future__ import annotations

from typing import Any

import torch

from rldsl.backends.torch.kernels.autograd import Function


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """[N] int64: where each number of a permutation is."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def reorder(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """rows[order]. order: a permutation of all rows; inverse: `inverse_of` it."""
    if rows.device.type == "cpu":
        return rows[order]
    out: torch.Tensor = Reorder.apply(rows, order, inverse)
    return out


def repeat_and_reorder(rows: torch.Tensor, times: int, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """[N, ...] -> [times * N, ...]: each row `times` times in a row, and all these in another order."""
    if rows.device.type == "cpu":
        return rows[order // times]
    out: torch.Tensor = RepeatAndReorder.apply(rows, times, order, inverse)
    return out


class Reorder(Function):
    """See `reorder`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class RepeatAndReorder(Function):
    """See `repeat_and_reorder`. The gradients of a row are added in the order of its copies."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, times: int, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return rows.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        each = grad.index_select(0, *ctx.saved_tensors).unflatten(0, (-1, ctx.times)).unbind(1)
        total = each[0]
        for other in each[1:]:
            total = total + other
        return total, None, None, None
