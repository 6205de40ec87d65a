"""Activations that compute an element in the same way wherever it is in a tensor, and the gradient of SiLU.

torch's own compute the last elements of a tensor differently from the rest: SiLU gets complete vectors, sigmoid and
GELU are built from other functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.model.invariant_products import pad_to_multiple

VECTORS = 64       # elements of a whole number of a CPU's vectors, as its kernels read them
THREAD_RUN = 1 << 15  # elements up to which torch lets one thread compute an operation


class _SiLU(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        if x.device.type == "cpu":
            return _in_vectors(torch.ops.aten.silu.out, x)
        wide = x.float()
        return (wide / torch.neg(wide).exp_().add_(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.device.type == "cpu":
            return _in_vectors(lambda g, x, out: torch.ops.aten.silu_backward.grad_input(g, x, grad_input=out), grad, x)
        wide = x.float()
        s = 1 / torch.neg(wide).exp_().add_(1)  # not torch's own, for the reason that the forward has
        found: torch.Tensor = (grad * (s * (1 + wide * (1 - s)))).to(x.dtype)
        return found


def _in_vectors(compute: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """compute(*inputs, out=result) of tensors of one shape, element by element, on a CPU. torch computes whole vectors
    by one kernel and what is left over at the end of a thread's part by another, so nothing may be left over: a thread
    gets THREAD_RUN elements or fewer, and vectors at the end are padded."""
    out = inputs[0].new_empty(inputs[0].shape)
    flat, count = [x.reshape(-1) for x in (*inputs, out)], out.numel()
    whole, size = count - count % VECTORS, THREAD_RUN * torch.get_num_threads()
    for start in range(0, whole, size):
        *given, found = (x[start : min(start + size, whole)] for x in flat)
        compute(*given, out=found)
    if whole < count:
        *given, found = (x[whole:] for x in flat)
        complete = found.new_empty(VECTORS)
        compute(*(pad_to_multiple(x, VECTORS) for x in given), out=complete)
        found.copy_(complete[: count - whole])
    return out


def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """x / (1 + exp(-x)), element by element, computed in float32. inplace: accepted and ignored."""
    out: torch.Tensor = _SiLU.apply(x)
    return out


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), element by element, computed in float32."""
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Hendrycks & Gimpel 2016, exact or, with "tanh", their approximation; element by element, in float32."""
    wide = x.float()
    if approximate == "none":
        out = 0.5 * wide * (1 + torch.erf(wide * 0.7071067811865476))  # sqrt(1 / 2)
    else:
        out = 0.5 * wide * (1 + torch.tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))  # sqrt(2 / pi)
    return out.to(x.dtype)
