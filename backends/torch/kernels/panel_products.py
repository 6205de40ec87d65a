"""Products of many rows of float32 on CPUs, by `cpu_panels.c`, which says how.

In: rows and the weight of a linear layer, each as it is stored or transposed. Out: their product, without a gradient.

oneDNN multiplies about as fast, but it compiles code for each number of rows, which takes 0.2 to 1 ms, and keeps it: in
training nearly every pass has another number of tokens, so that 1,024 products of half a megabyte each come to lie
between the tensors, and the heap grows step by step. Without compiled kernels there is none (`takes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rldsl.backends.torch.kernels import operators
from rldsl.backends.torch.kernels.kernel_library import KernelCall, are_plain, available


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `panel_product` computes x [n, k] @ weight [m, k].T + bias [m]. The first call may compile it."""
    return (x.numel() > 0 and weight.numel() > 0 and 1 in x.stride() and 1 in weight.stride()
            and are_plain(x, weight) and (bias is None or are_plain(bias) and bias.is_contiguous())
            and not torch.is_autocast_enabled("cpu") and available())


def panel_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, k] @ weight [m, k].T + bias [m] -> [n, m], without a gradient."""
    out: torch.Tensor = operators.call(torch.ops.rldsl.panel_product, _multiply, x, weight, bias)
    return out


def add_panel_product(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """total [n, m] + x [n, k] @ weight [m, k].T, in place; of what `takes` takes. total: contiguous, float32.
    Errors: ValueError for another total."""
    if total.shape != (len(x), len(weight)) or total.dtype != torch.float32 or not total.is_contiguous():
        raise ValueError(f"a total of {tuple(total.shape)} does not take {len(x)} rows of {len(weight)}")
    _call(total, x, weight, None, adds=True)()
    return total


def _call(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
          adds: bool = False) -> KernelCall:
    (rows, size), columns = x.shape, weight.shape[0]
    return KernelCall("panel_products", (x, *x.stride(), weight, *weight.stride()[::-1], bias, rows, columns, size,
                                         int(adds), out))


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    _call(out, x, weight, bias)()
    return out


_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
_OPERATORS.define("panel_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATORS.impl("panel_product", _multiply, "CPU")

# as that of `cpu_kernels`
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.panel_product.default: lambda out, args: _call(out, *args)}
