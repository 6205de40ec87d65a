"""Linear layers with their gradients on CPUs.

In: rows, and the weights of layers that read them. Out: what `products.multiplied` makes of each. The gradients of all
weights, added where they are kept, and the sum of the gradients of the input are one call of C (`cpu_layers.c`) where
panels multiply: a layer of a small model takes less time than Python takes to call four kernels, and a sum of gradients
that a product adds to needs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rldsl.backends.torch.kernels import panel_products, products
from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.held_gradients import held_gradient, parameter_of
from rldsl.backends.torch.kernels.kernel_library import INT, are_plain, check, library


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., k] @ weight [m, k].T + bias [m]."""
    if x.dim() < 2:
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    out: torch.Tensor | None = None
    if not torch.is_grad_enabled():
        out = products.multiplied_here(rows, weight, bias)
    elif _has_own_gradient(rows, weight, bias):
        out = _Linears.apply(rows, 1, weight, bias)[0]
    if out is None:
        return F.linear(x, weight, bias)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)


def _has_own_gradient(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a layer is one of `_Linears`, under gradients: its product is, or its weight has a gradient to add to."""
    return (products.is_multiplied_here(x, weight, bias)
            or weight.requires_grad and products.are_multiplied_as_they_are(x, weight))


class CpuLinear(nn.Linear):
    """A linear layer whose products the fastest way computes."""

    shared: SharedInput | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.shared is not None and torch.is_grad_enabled():
            return self.shared.output(self, input)
        return linear(input, self.weight, self.bias)


def use_cpu_linear(module: nn.Module) -> None:
    """Let the plain linear layers of a model be `CpuLinear`."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = CpuLinear


def outputs(x: torch.Tensor, layers: Sequence[nn.Module]) -> tuple[torch.Tensor, ...]:
    """Of linear layers that read x [..., k], as one function where they have gradients and nothing else to do."""
    found = _outputs_of_one_function(x, layers) if torch.is_grad_enabled() else None
    return found or tuple(layer(x) for layer in layers)


def _outputs_of_one_function(x: torch.Tensor, layers: Sequence[nn.Module]) -> tuple[torch.Tensor, ...] | None:
    """None where there is none for these."""
    if x.dim() < 2 or not all(map(_only_multiplies, layers)):
        return None
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    weights: Any = [layer.weight for layer in layers]
    biases: Any = [layer.bias for layer in layers]
    if not all(_has_own_gradient(rows, *pair) for pair in zip(weights, biases, strict=True)):
        return None
    found: tuple[torch.Tensor, ...] = _Linears.apply(rows, len(layers), *weights, *biases)
    return found if x.dim() == 2 else tuple(out.view(*x.shape[:-1], -1) for out in found)


def _only_multiplies(layer: nn.Module) -> bool:
    """Whether to call a layer is to call the forward of its class."""
    return (type(layer) is CpuLinear and "forward" not in layer.__dict__
            and not layer._forward_hooks and not layer._forward_pre_hooks)


class SharedInput:
    """Linear layers that a forward calls in turn with the same tensor, as that of attention does, under gradients: at
    the call of the first one the results of all are made."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.enabled = True  # until some results are not asked for
        self.input: tuple[torch.Tensor, int] | None = None  # and its version
        self.made: dict[nn.Module, torch.Tensor] = {}  # results that have not been asked for
        for layer in layers:
            layer.shared = self  # type: ignore[assignment]

    def output(self, layer: CpuLinear, x: torch.Tensor) -> torch.Tensor:
        """Of one of the layers."""
        if layer is self.layers[0]:
            self.enabled = self.enabled and not self.made
            found = _outputs_of_one_function(x, self.layers) if self.enabled else None
            if found is not None:
                self.input = x, x._version
                self.made = dict(zip(self.layers[1:], found[1:], strict=True))
                return found[0]
            self.made, self.input = {}, None
        elif self.input is not None and self.input[0] is x and self.input[1] == x._version and layer in self.made:
            out = self.made.pop(layer)
            if not self.made:
                self.input = None
            return out
        return linear(x, layer.weight, layer.bias)


class _Linears(Function):
    """(x [n, k], the number of layers, their weights [m, k], their biases [m] or None) -> ([n, m], ...). The results
    are no views: a sum over tp is made in the place of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, *parameters: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        weights: Any = parameters[:count]
        ctx.save_for_backward(x, *weights)
        ctx.parameters = [parameter_of(weight) for weight in weights]
        ctx.set_materialize_grads(False)
        return tuple(products.multiplied(x, *pair) for pair in zip(weights, parameters[count:], strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad
        needs, of_biases = needs[: len(weights)], needs[len(weights) :]
        totals = [held_gradient(parameter) if need else None
                  for parameter, need in zip(ctx.parameters, needs, strict=True)]
        own: Sequence[torch.Tensor | None] = [None] * len(weights)
        if _adds_at_once(x, weights, grads) and all(
                total is not None or not need for total, need in zip(totals, needs, strict=True)):
            grad_x = _add_gradients(x, weights, grads, totals, needs_x)
        else:
            grad_x = _sum_of_products(weights, grads) if needs_x else None
            own = [_weight_gradient(total, x, grad) if need and grad is not None else None
                   for total, grad, need in zip(totals, grads, needs, strict=True)]
        return grad_x, None, *own, *(grad.sum(0) if need and grad is not None else None
                                     for grad, need in zip(grads, of_biases, strict=True))


def _sum_of_products(weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The gradient of the input; None if no result has one."""
    total: torch.Tensor | None = None
    for weight, grad in zip(weights, grads, strict=True):
        if grad is not None:
            own = products.product(grad, weight.T)
            total = own if total is None else total.add_(own)
    return total


def _weight_gradient(total: torch.Tensor | None, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """grad [n, m].T @ x [n, k]. None where it was added to what the parameter holds, which saves a tensor as
    large as the parameter and a pass over both."""
    grad = grad.contiguous()
    if total is None:
        return products.product(grad.T, x.T)
    products.add_product(total, grad.T, x.T)
    return None


def _adds_at_once(x: torch.Tensor, weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> bool:
    """Whether `_add_gradients` takes these."""
    return x.stride(1) == 1 and are_plain(x) and products.panels_are_fast() and all(
        grad is not None and grad.is_contiguous() and weight.is_contiguous() and panel_products.takes(grad, weight)
        for weight, grad in zip(weights, grads, strict=True))


def _add_gradients(x: torch.Tensor, weights: Sequence[torch.Tensor], grads: Sequence[Any],
                   totals: Sequence[torch.Tensor | None], needs_x: bool) -> torch.Tensor | None:
    """Add the gradients of the weights to `totals`, where there are any. Returns that of x."""
    (rows, size), grad_x = x.shape, torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
    numbers: list[int] = []
    for weight, grad, total in zip(weights, grads, totals, strict=True):
        numbers += (weight.shape[0], weight.data_ptr(), grad.data_ptr(), 0 if total is None else total.data_ptr())
    check(library().linear_layers_backward(
        x.data_ptr(), x.stride(0), rows, size, (INT * len(numbers))(*numbers), len(weights),
        None if grad_x is None else grad_x.data_ptr()))
    return grad_x
