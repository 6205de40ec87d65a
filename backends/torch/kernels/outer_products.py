"""Gradients of weights in float32 on CPUs, added to what they are already, by `cpu_products.c`.

In: what a linear layer was given, and the gradient of its result. Out: a total to which the product is added in place:
a library multiplies at the same speed or less, and copies both transposed before or the result after. Without compiled
kernels there is none (`takes`).
"""

from __future__ import annotations

import torch
from torch import nn

from rldsl.backends.torch.kernels.kernel_library import available, library

COLUMNS = 16     # of which the total has a multiple: those of the widest vector
MAX_ROWS = 1024  # of the total: rows of the gradient that are farther apart in memory take longer to fetch


def takes(grad: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `add` computes grad [n, m].T @ x [n, k]. The first call may compile it."""
    return (0 < grad.shape[1] <= MAX_ROWS and x.shape[1] > 0 and x.shape[1] % COLUMNS == 0
            and all(type(t) in (torch.Tensor, nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu"
                    and t.is_contiguous() for t in (grad, x))
            and not torch.is_autocast_enabled("cpu") and available())


def add(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """total [m, k] + grad [n, m].T @ x [n, k], in place; of what `takes` takes. total: contiguous, float32.
    Errors: ValueError for another total."""
    (terms, rows), columns = grad.shape, x.shape[1]
    if total.shape != (rows, columns) or len(x) != terms or total.dtype != torch.float32 or not total.is_contiguous():
        raise ValueError(f"a total of {tuple(total.shape)} does not take {terms} products of {rows} and {columns}")
    library().add_outer_products(grad.data_ptr(), x.data_ptr(), terms, rows, columns, total.data_ptr())
    return total
