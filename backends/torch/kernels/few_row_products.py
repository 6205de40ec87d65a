"""Products of few rows of float32 on CPUs, as in decoding, by `cpu_products.c`, which says how.

In: rows and the weight of a linear layer. Out: their product, without a gradient. A library multiplies as many numbers
a second where rows are many; where they are few, this is 1.1 to 2.5 times as fast. Without a compiler there is none
(`takes`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels import c_compiler

SOURCE = Path(__file__).with_name("cpu_products.c")
MIN_ROWS = 5            # with fewer most of a vector is empty
MAX_ELEMENTS = 1 << 17  # of all rows, which stay in the cache while the weight passes by

POINTER, INT = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = {
    "few_row_product": (POINTER, INT, POINTER, POINTER, INT, INT, INT, POINTER),
    "few_row_sample": (POINTER, INT, POINTER, POINTER, INT, INT, INT, ctypes.c_float, POINTER, POINTER),
}


@cache
def _library() -> Any:
    """The compiled functions; None if they cannot be had."""
    return c_compiler.load(SOURCE, c_compiler.FAST_FLAGS, ARGUMENTS)


def takes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `few_row_product` computes x [n, k] @ weight [m, k].T + bias [m]. The first call may compile it."""
    return (MIN_ROWS <= len(x) and x.numel() <= MAX_ELEMENTS and x.numel() > 0 and x.stride(1) == 1
            and weight.is_contiguous() and (bias is None or bias.is_contiguous())
            and all(type(t) in (torch.Tensor, nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu"
                    for t in (x, weight, *(() if bias is None else (bias,))))
            and not torch.is_autocast_enabled("cpu") and _library() is not None)


def few_row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, k] @ weight [m, k].T + bias [m] -> [n, m], without a gradient."""
    out: torch.Tensor = torch.ops.rldsl.few_row_product(x, weight, bias)
    return out


def _multiply_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    (rows, size), columns = x.shape, len(weight)
    if _library().few_row_product(x.data_ptr(), x.stride(0), weight.data_ptr(),
                                  None if bias is None else bias.data_ptr(), rows, columns, size, out.data_ptr()):
        raise MemoryError("no memory for the rows of a product")


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(len(x), len(weight))
    _multiply_into(out, x, weight, bias)
    return out


def sample_into(out: tuple[torch.Tensor, torch.Tensor], hidden: torch.Tensor, head: torch.Tensor, draws: torch.Tensor,
                temperature: float) -> None:
    """What `cpu_kernels.sample` computes, without a table of all logits, of what `takes` takes."""
    (rows, size), columns = hidden.shape, len(head)
    if _library().few_row_sample(hidden.data_ptr(), hidden.stride(0), head.data_ptr(), draws.data_ptr(), rows, columns,
                                 size, temperature, *(x.data_ptr() for x in out)):
        raise MemoryError("no memory for the logits of a step")


_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
_OPERATORS.define("few_row_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_OPERATORS.impl("few_row_product", _multiply, "CPU")

# as that of `cpu_kernels`
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.few_row_product.default: lambda out, args: partial(_multiply_into, out, *args)}
