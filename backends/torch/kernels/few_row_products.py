"""Products of few rows of float32 on CPUs, as in decoding, by `cpu_products.c`, which says how.

In: rows and the weight of a linear layer. Out: their product, without a gradient. A library multiplies as many numbers
a second where rows are many; where they are few, this is 1.1 to 3 times as fast. Without compiled kernels there is
none (`takes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rldsl.backends.torch.kernels import operators
from rldsl.backends.torch.kernels.kernel_library import KernelCall, are_plain, available

MAX_ELEMENTS = 1 << 17  # of all rows, which stay in the cache while the weight passes by


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `few_row_product` computes x [n, k] @ weight [m, k].T + bias [m]. The first call may compile it."""
    return (0 < x.numel() <= MAX_ELEMENTS and x.stride(1) == 1 and weight.is_contiguous()
            and are_plain(x, weight) and (bias is None or are_plain(bias) and bias.is_contiguous())
            and not torch.is_autocast_enabled("cpu") and available())


def few_row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, k] @ weight [m, k].T + bias [m] -> [n, m], without a gradient."""
    out: torch.Tensor = operators.call(torch.ops.rldsl.few_row_product, _multiply, x, weight, bias)
    return out


def product_call(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> KernelCall:
    """The same into `out`, of what `takes` takes."""
    (rows, size), columns = x.shape, weight.shape[0]
    return KernelCall("few_row_product", (x, x.stride(0), weight, bias, rows, columns, size, out))


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    product_call(out, x, weight, bias)()
    return out


_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
_OPERATORS.define("few_row_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATORS.impl("few_row_product", _multiply, "CPU")

# as that of `cpu_kernels`
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.few_row_product.default: lambda out, args: product_call(out, *args)}
