"""Gradients of parameters added where they are kept, on CPUs.

In: a parameter and its next gradient. autograd makes a tensor of each gradient and then adds it to `.grad`; of a large
matrix, such as that of a vocabulary, both take longer than many layers. A function with its own gradient adds it to
`held_gradient` instead, and returns None.
"""

from __future__ import annotations

import torch
from torch import nn

from rldsl.backends.torch.kernels.kernel_library import available, library


def parameter_of(weight: torch.Tensor) -> nn.Parameter | None:
    """The parameter that a weight is, for a function's context: what is saved for the backward pass may be another
    tensor there, under recomputation."""
    return weight if type(weight) is nn.Parameter else None


def held_gradient(parameter: nn.Parameter | None) -> torch.Tensor | None:
    """Its `.grad`, float32 and contiguous, where nothing but that is to see the next gradient; else None."""
    if parameter is None or not parameter.is_leaf or torch.is_grad_enabled() or parameter.device.type != "cpu":
        return None
    grad = parameter.grad
    if grad is None or grad.dtype != torch.float32 or not grad.is_contiguous():
        return None
    return None if parameter._backward_hooks or parameter._post_accumulate_grad_hooks else grad


def add_gradient(total: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """total + grad, both [rows, columns], in place. total: contiguous, float32. A gradient in the order of columns is
    transposed in registers, in a sixth to a half of the time that torch takes."""
    by_columns = grad.dim() == 2 and not grad.is_contiguous() and grad.T.is_contiguous()
    if not (by_columns and grad.shape == total.shape and grad.dtype == torch.float32 and available()):
        return total.add_(grad)
    library().add_transposed(grad.data_ptr(), *grad.shape, total.data_ptr())
    return total
