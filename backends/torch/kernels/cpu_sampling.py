"""Tokens from the softmax of a head's logits on CPUs, in one kernel.

In: float32 hidden states, the head and random numbers. Out: tokens and their log-probs. Few rows never have a table of
logits (`few_row_sample` in `cpu_products.c`); of others it is made before `sample` in `cpu_kernels.c` reads it. Only
where `cpu_kernels.takes` the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rldsl.backends.torch.kernels import few_row_products, operators
from rldsl.backends.torch.kernels.kernel_library import KernelCall, check, library
from rldsl.backends.torch.kernels.products import wide_product


def sample(hidden: torch.Tensor, head: torch.Tensor, draws: torch.Tensor, temperature: float
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [S] int64 by `draws` [S] float64 in (0, 1) from softmax(hidden @ head.T / temperature), the first at which
    the cumulative sum exceeds the draw, and their log-probs [S]. hidden: [S, H]; head: [V, H]."""
    out: tuple[torch.Tensor, torch.Tensor] = operators.call(torch.ops.rldsl.sample, _sample, hidden, head, draws,
                                                            temperature)
    return out


def _sample_call(out: tuple[torch.Tensor, torch.Tensor], hidden: torch.Tensor, head: torch.Tensor, draws: torch.Tensor,
                 temperature: float) -> Callable[[], None]:
    if not few_row_products.takes(hidden, head):
        return partial(_sample_from_table, out, hidden, head, draws, temperature)
    (rows, size), columns = hidden.shape, len(head)
    return KernelCall("few_row_sample", (hidden, hidden.stride(0), head, draws, rows, columns, size, temperature, *out))


def _sample_from_table(out: tuple[torch.Tensor, torch.Tensor], hidden: torch.Tensor, head: torch.Tensor,
                       draws: torch.Tensor, temperature: float) -> None:
    table = wide_product(hidden, head).contiguous()
    check(library().sample(table.data_ptr(), draws.data_ptr(), *table.shape, temperature, *(x.data_ptr() for x in out)))


def _sample(hidden: torch.Tensor, head: torch.Tensor, draws: torch.Tensor, temperature: float
            ) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(draws, dtype=torch.long), torch.empty_like(draws, dtype=hidden.dtype)
    _sample_call(out, hidden, head, draws, temperature)()
    return out


_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
_OPERATORS.define("sample(Tensor hidden, Tensor head, Tensor draws, float temperature) -> (Tensor, Tensor)")
_OPERATORS.impl("sample", _sample, "CPU")

# as that of `cpu_kernels`
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.sample.default: lambda out, args: _sample_call(tuple(out), *args)}
