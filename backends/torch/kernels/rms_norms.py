"""Fused root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467): few passes over memory.

In: the modules of a model family. Out: the same modules; those that compute x / rms(x) * weight get a function with a
gradient of its own, which saves only the normalized values and reads them twice, where autograd's steps take a dozen
passes.

Which modules these are is found by trying them on a few numbers: one with other results, such as those of families that
add 1 to the weight, is left as it is, and so is whatever is not float32.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.kernels import cpu_kernels
from rldsl.backends.torch.kernels.autograd import Function

PlainNorm = Callable[[torch.Tensor], torch.Tensor]
# (x, weight, eps, the module's own forward) -> like x
NormFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PlainNorm], torch.Tensor]


class RMSNormFunction(Function):
    """(x [..., H], weight [H], eps [] tensor) -> x / sqrt(mean(x^2) + eps) * weight [..., H]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        normalized, scale = normalize(x, eps)
        ctx.save_for_backward(normalized, scale, weight)
        return normalized * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """With n = x / rms(x) and g = grad * weight, the gradient of x is (g - n mean(g n)) / rms(x)."""
        normalized, scale, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        product = grad * normalized
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).div_(len(weight)).unsqueeze(-1)
            # `product` is not needed any more: its memory takes the result
            grad_x = torch.mul(grad, weight, out=product).addcmul_(normalized, mean, value=-1).mul_(scale)
        return grad_x, grad_weight, None


class CompiledRMSNorm(Function):
    """As `RMSNormFunction`, by `cpu_kernels`, with x kept in place of its normalized values, which are not written to
    memory. eps: a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, scale = cpu_kernels.normalized(x, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        return *cpu_kernels.rms_norm_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None


def normalize(x: torch.Tensor, eps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x), 1 / rms(x)), over the last dimension."""
    squares = (x * x).sum(-1, keepdim=True)
    scale = torch.add(eps, squares, alpha=1 / x.shape[-1]).rsqrt_()
    return x * scale, scale


def fuse_norms(module: nn.Module, device: torch.device, function_of: Callable[[str], NormFunction] | None = None,
               library: bool = False, compiled: bool = False) -> list[str]:
    """Replace the forward of every norm in `module` that computes what `RMSNormFunction` does. Returns their names.
    function_of: name of a norm -> what computes it (None: `RMSNormFunction`, if all numbers are float32). library: let
    torch's kernel compute them instead. compiled: let `cpu_kernels` do it, where there are some."""
    fusible: dict[tuple[type, float, torch.Size], bool] = {}  # norms of one kind differ in their weights alone
    fused = []
    for name, norm in module.named_modules():
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(eps, float) or [*norm._parameters] != ["weight"]:
            continue
        weight = norm._parameters["weight"]
        if weight is None:
            continue
        kind = type(norm), eps, weight.shape
        if kind not in fusible:
            fusible[kind] = _is_plain_rms_norm(norm, weight.shape, eps)
        if fusible[kind]:
            function = function_of(name) if function_of else _library_norm(eps) if library else \
                _compiled_norm(eps) if compiled else _fused
            norm.forward = _fused_forward(norm, norm.forward, torch.tensor(eps, device=device), function)
            fused.append(name)
    return fused


def _fused_forward(norm: nn.Module, plain: Callable[..., torch.Tensor], eps: torch.Tensor, function: NormFunction
                   ) -> Callable[..., torch.Tensor]:
    def forward(hidden_states: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        if any(x is not None for x in (*more, *options.values())):  # a gate, say
            return plain(hidden_states, *more, **options)
        weight: Any = norm.weight  # looked up at each call: it may be a property that rounds (`model/autocast.py`)
        return function(hidden_states, weight, eps, plain)

    return forward


def _fused(x: torch.Tensor, weight: torch.Tensor, eps: torch.Tensor, plain: PlainNorm) -> torch.Tensor:
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return plain(x)
    out: torch.Tensor = RMSNormFunction.apply(x, weight, eps)
    return out


def _library_norm(eps: float) -> NormFunction:
    """torch's own: on a GPU one kernel forward, and few backward."""
    def function(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor, plain: PlainNorm) -> torch.Tensor:
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return plain(x)
        return F.rms_norm(x, weight.shape, weight, eps)

    return function


def _compiled_norm(eps: float) -> NormFunction:
    def function(x: torch.Tensor, weight: torch.Tensor, eps_tensor: torch.Tensor, plain: PlainNorm) -> torch.Tensor:
        if not cpu_kernels.takes(x, weight):
            return _fused(x, weight, eps_tensor, plain)
        if not torch.is_grad_enabled():
            return cpu_kernels.rms_norm(x, weight, eps)
        out: torch.Tensor = CompiledRMSNorm.apply(x, weight, eps)
        return out

    return function


@torch.no_grad()
def _is_plain_rms_norm(norm: nn.Module, shape: torch.Size, eps: float) -> bool:
    """Whether, on numbers of several magnitudes, the module computes what the function does."""
    if len(shape) != 1:
        return False
    trial = copy(norm)
    weight = nn.Parameter(torch.linspace(0.5, 2.0, shape[0]))
    trial._parameters = {"weight": weight}
    x = torch.linspace(-2, 3, 4 * shape[0]).view(4, -1) * torch.tensor([[1e-3], [0.1], [1.0], [30.0]])
    try:
        result = trial(x)
    except Exception:  # a module with another signature, or one that needs more
        return False
    expected = RMSNormFunction.apply(x, weight, torch.tensor(eps))
    return isinstance(result, torch.Tensor) and result.shape == x.shape and torch.allclose(result, expected, 1e-5, 1e-6)
