"""Sums in one order on a GPU, whose libraries choose an order by the shape of the whole operation.

In: reductions over the last dimension, and products of matrices. Out: the same numbers but for rounding, each computed
in an order that its own terms alone decide: neither how many rows and columns there are nor where an element stands
changes a bit.

Reductions add halves element by element, and element-wise kernels compute each element alone. Products need a kernel of
their own (`ordered_products.py`). On a CPU none of this is used: torch's own are faster, and
`model/invariant_probe.py` tries them. The tests run this on a CPU, the kernel in Triton's interpreter, and compile the
kernel for two generations of GPUs; docs/gpu.md says what has run on one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F


def needed(x: torch.Tensor) -> bool:
    """Whether torch's own reductions and products depend on shapes on this tensor's device."""
    return x.device.type != "cpu"


def missing(device: torch.device) -> str:
    """What is not here that this device needs, or ""."""
    return "" if device.type == "cpu" or find_spec("triton") is not None else "Triton, which is not installed"


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[..., n, k] @ [..., k, m] -> [..., n, m], with equal or broadcastable dimensions before the last two."""
    shape = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    left, right = (x.expand(*shape, *x.shape[-2:]).flatten(0, -3) if shape else x[None] for x in (left, right))
    kernel = import_module("rldsl.backends.torch.kernels.ordered_products").products
    out: torch.Tensor = kernel(left, right)
    return out.view(*shape, *out.shape[1:])


def row_sum(x: torch.Tensor, keepdim: bool = False) -> torch.Tensor:
    """[..., n] -> [...], or [..., 1]: the sum over the last dimension."""
    if not needed(x):
        return x.sum(-1, keepdim=keepdim)
    if x.shape[-1] == 0:
        x = F.pad(x, (0, 1))
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        rest, x = x[..., half:], x[..., :half].clone()
        x[..., : width - half] += rest
    return x if keepdim else x[..., 0]


def row_cumsum(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n]: sums up to each element of the last dimension (Hillis and Steele 1986)."""
    if not needed(x):
        return x.cumsum(-1)
    reach = 1
    while reach < x.shape[-1]:
        x = torch.cat([x[..., :reach], x[..., reach:] + x[..., :-reach]], -1)
        reach *= 2
    return x


def softmax(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., n], over the last dimension."""
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / row_sum(weights, keepdim=True)


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) over the last dimension."""
    centered = x - row_sum(x, keepdim=True) / x.shape[-1]
    return centered / (row_sum(centered * centered, keepdim=True) / x.shape[-1] + eps).sqrt()


# ------------------------------------------------------------------------------------------------ torch's functions


def replacement(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Callable[[], torch.Tensor] | None:
    """What computes a call of torch in one order; None if torch's own does, or if it is no reduction over the last
    dimension alone."""
    build = REDUCTIONS.get(func)
    if build is None or not args or not isinstance(args[0], torch.Tensor) or not needed(args[0]):
        return None
    return build(args[0], args[1:], dict(options)) if args[0].is_floating_point() else None


def _over_last(compute: Callable[[torch.Tensor, bool], torch.Tensor]
               ) -> Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]], Callable[[], torch.Tensor] | None]:
    """compute: (x in the dtype of the sum, keepdim) -> result."""
    def build(x: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
        names = ("dim", "keepdim")
        given = dict(zip(names, rest, strict=False)) | options
        dim = given.get("dim")
        dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        if len(dims) != 1 or not isinstance(dims[0], int) or dims[0] % max(x.dim(), 1) != x.dim() - 1:
            return None
        dtype = given.get("dtype") or x.dtype
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        return lambda: compute(x.to(wide), bool(given.get("keepdim", False))).to(dtype)

    return build


def _layer_norm(x: torch.Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
    given = dict(zip(("normalized_shape", "weight", "bias", "eps"), rest, strict=False)) | options
    if len(given["normalized_shape"]) != 1:
        return None

    def compute() -> torch.Tensor:
        out = normalize(x.float(), given.get("eps", 1e-5))
        out = out if given.get("weight") is None else out * given["weight"]
        return (out if given.get("bias") is None else out + given["bias"]).to(x.dtype)

    return compute


_SUM = _over_last(row_sum)
_MEAN = _over_last(lambda x, keepdim: row_sum(x, keepdim) / x.shape[-1])
_CUMSUM = _over_last(lambda x, _: row_cumsum(x))
_SOFTMAX = _over_last(lambda x, _: softmax(x))
_LOG_SOFTMAX = _over_last(lambda x, _: x - x.amax(-1, keepdim=True) - row_sum(
    (x - x.amax(-1, keepdim=True)).exp(), keepdim=True).log())
REDUCTIONS: dict[Any, Callable[[torch.Tensor, tuple[Any, ...], dict[str, Any]],
                                Callable[[], torch.Tensor] | None]] = {
    torch.sum: _SUM, torch.Tensor.sum: _SUM, torch.mean: _MEAN, torch.Tensor.mean: _MEAN,
    torch.cumsum: _CUMSUM, torch.Tensor.cumsum: _CUMSUM, torch.softmax: _SOFTMAX, torch.Tensor.softmax: _SOFTMAX,
    F.softmax: _SOFTMAX, torch.log_softmax: _LOG_SOFTMAX, torch.Tensor.log_softmax: _LOG_SOFTMAX,
    F.log_softmax: _LOG_SOFTMAX, F.layer_norm: _layer_norm}
