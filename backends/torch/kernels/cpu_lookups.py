"""torch's operators in a decode step that a kernel repeats in a trace, bit for bit: sums and rows of tables.

In: an operator's arguments and its result. Out: the call that computes the result anew (CALLS); None for tensors that
its kernel does not take. A call of torch's operator takes longer than what these compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rldsl.backends.torch.kernels.cpu_kernels import takes
from rldsl.backends.torch.kernels.kernel_library import KernelCall, available


def _add(out: torch.Tensor, args: Sequence[Any]) -> KernelCall | None:
    a, b = args
    if not isinstance(b, torch.Tensor) or not a.shape == b.shape == out.shape:
        return None
    if takes(a, b, out):
        return KernelCall("add", (a, b, out.numel(), out))
    return KernelCall("add_integers", (a, b, out.numel(), out)) if _are_integers(a, b, out) else None


def _embedding(out: torch.Tensor, args: Sequence[Any]) -> KernelCall | None:
    table, ids = args[:2]
    if not takes(table, out) or not _are_integers(ids):
        return None
    return KernelCall("select_rows", (table, *table.shape, ids, ids.numel(), out))


def _gather(out: torch.Tensor, args: Sequence[Any]) -> KernelCall | None:
    """One element of each row, as the random number of each sequence."""
    x, dim, index = args
    if (type(x) is not torch.Tensor or x.dtype is not torch.float64 or not x.is_cpu or not x.is_contiguous()
            or x.dim() != 2 or dim not in (1, -1) or index.shape != (len(x), 1) or not _are_integers(index)):
        return None
    return KernelCall("select_columns", (x, x.shape[1], index, len(x), out))


def _are_integers(*tensors: torch.Tensor) -> bool:
    return all(type(x) is torch.Tensor and x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()
               for x in tensors) and available()


CALLS: Mapping[Any, Callable[[torch.Tensor, Sequence[Any]], KernelCall | None]] = {
    torch.ops.aten.add.Tensor: _add,
    torch.ops.aten.embedding.default: _embedding,
    torch.ops.aten.gather.default: _gather,
}
