"""Updates by AdamW of float32 parameters on CPUs, in one pass over memory, by `cpu_optimizers.c`.

In: a parameter with its gradient and state. Out: what torch leaves that multiplies the gradient to clip it, updates by
its fused AdamW and then clears the gradient, bit for bit. torch rounds the last elements of a tensor, fewer than a
vector, otherwise than the rest; here they are like the rest, so an element's update does not depend on where it is. A
trial at first use says whether torch's vectors have these bits on this machine; where not, and without a compiler,
torch's own kernel runs (`takes`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from rldsl.backends.torch.kernels import cpu_kernels
from rldsl.backends.torch.kernels.kernel_library import FLOAT, library

TRIED = 1 << 12  # elements of the trial: a multiple of a CPU's vectors


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """One update, by the names of torch's AdamW."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    count: int  # of this update; the first is 1


class Coefficients(ctypes.Structure):
    """What an update multiplies by; `cpu_optimizers.c` describes the fields."""

    _fields_ = [(name, FLOAT) for name in ("factor", "kept", "fresh", "beta2", "fresh_square", "root_bias", "eps",
                                           "step")]


def coefficients(step: AdamWStep, factor: float) -> Coefficients:
    """Of an update with gradients times `factor`. Computed in float64, as by torch, and rounded to float32."""
    beta1, beta2 = step.betas
    return Coefficients(factor, 1 - step.lr * step.weight_decay, 1 - beta1, beta2, 1 - beta2,
                        (1 - beta2**step.count) ** 0.5, step.eps, step.lr / (1 - beta1**step.count))


def takes(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `update` takes these. The first call may compile it."""
    return cpu_kernels.takes(*tensors) and has_torchs_bits()


def update(parameter: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
           by: Coefficients) -> None:
    """Update a parameter, its mean and its square, all of one shape, and set its gradient to 0."""
    library().adamw(parameter.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
                    parameter.numel(), ctypes.byref(by))


@cache
def has_torchs_bits() -> bool:
    """Whether the vectors of torch's kernel round as the kernel here does: where neither or both fuse products with
    sums. Torch may be told to use smaller vectors than the processor has, which do not."""
    return all(_agree(AdamWStep(1e-2, betas, 1e-8, 0.1, 1)) for betas in ((0.9, 0.999), (0.4, 0.95)))


def _agree(first: AdamWStep) -> bool:
    """Whether two updates have the same bits."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    whole, *grads = torch.randn(3, TRIED, generator=draw, device="cpu")
    ours, torchs = ((whole.clone(), *torch.zeros(2, TRIED, device="cpu")) for _ in range(2))
    count = torch.zeros((), device="cpu")
    for i, grad in enumerate(grads):
        parameter, mean, square = ours
        update(parameter, grad.clone(), mean, square, coefficients(replace(first, count=first.count + i), 1.0))
        count.add_(1)
        parameters, means, squares = ([x] for x in torchs)
        torch._fused_adamw_(parameters, [grad], means, squares, [], [count], lr=first.lr, beta1=first.betas[0],
                            beta2=first.betas[1], weight_decay=first.weight_decay, eps=first.eps, amsgrad=False,
                            maximize=False)
    return all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))
