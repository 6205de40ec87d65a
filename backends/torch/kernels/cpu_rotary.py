"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) on CPUs: three passes over memory forward and three
backward, where the steps of `x * cos + rotate_half(x) * sin` take ten; and their angles.

In: float32 queries and keys, halves of whose heads are rotated; positions and frequencies. Out: the rotated ones;
cosines and sines. Nothing of queries and keys is kept for the gradient, which is the rotation by the opposite angles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rldsl.backends.torch.kernels import cpu_kernels, operators
from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.kernel_library import KernelCall, are_plain, available


class CpuRotary(Function):
    """(x [1, heads, T, D], cos, sin [1, T, D]) -> x * cos + rotate_half(x) * sin, with T before heads in memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        if _compiled(x, cos, sin):
            return cpu_kernels.rotate(x, cos, sin)
        out, half = x * cos[:, None], x.shape[-1] // 2
        out[..., :half].addcmul_(x[..., half:], sin[:, None, :, :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[:, None, :, half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        if _compiled(grad, cos, sin):
            return cpu_kernels.rotate(grad, cos, sin, backward=True), None, None
        out, half = grad * cos[:, None], grad.shape[-1] // 2
        out[..., :half].addcmul_(grad[..., half:], sin[:, None, :, half:])
        out[..., half:].addcmul_(grad[..., :half], sin[:, None, :, :half], value=-1)
        return out, None, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `CpuRotary` computes, with a gradient where one is wanted."""
    if not torch.is_grad_enabled() and _compiled(x, cos, sin):
        return cpu_kernels.rotary(x, cos, sin)
    out: torch.Tensor = CpuRotary.apply(x, cos, sin)
    return out


def _compiled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return cpu_kernels.takes(cos, sin) and are_plain(x) and x.stride(-1) == 1


def takes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether `CpuRotary` computes these."""
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (q, k, cos, sin)) and all(
        x.dim() == 4 and x.shape[0] == 1 and x.shape[-2:] == cos.shape[-2:] and x.shape[-1] % 2 == 0
        for x in (q, k)) and cos.dim() == 3 and cos.shape[0] == 1 and not (cos.requires_grad or sin.requires_grad)


# ----------------------------------------------------------------------------------------------------------- angles


def has_angles(positions: torch.Tensor, frequencies: torch.Tensor) -> bool:
    """Whether `angles` computes these."""
    return (type(positions) is torch.Tensor and positions.dtype is torch.int64 and positions.is_cpu
            and positions.is_contiguous() and are_plain(frequencies) and frequencies.is_contiguous() and available())


def angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and the sines of position * frequency, times `scaling`, twice in a row: [..., 2 F] each.
    positions: [...] int64; frequencies: [F]."""
    out: tuple[torch.Tensor, torch.Tensor] = operators.call(torch.ops.rldsl.rotary_angles, _angles, positions,
                                                            frequencies, scaling)
    return out


def _angles_call(out: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, frequencies: torch.Tensor,
                 scaling: float) -> KernelCall:
    return KernelCall("rotary_angles", (positions, frequencies, positions.numel(), len(frequencies), scaling, *out))


def _angles(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (frequencies.new_empty(*positions.shape, 2 * len(frequencies)) for _ in range(2))
    _angles_call((cos, sin), positions, frequencies, scaling)()
    return cos, sin


_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
_OPERATORS.define("rotary_angles(Tensor positions, Tensor frequencies, float scaling) -> (Tensor, Tensor)")
_OPERATORS.impl("rotary_angles", _angles, "CPU")

# as that of `cpu_kernels`
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.rotary_angles.default: lambda out, args: _angles_call(tuple(out), *args)}
