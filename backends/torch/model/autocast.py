"""The autocast policy: what modules of a bfloat16 model compute with besides matrix products.

In: a module with parameters of either dtype. Out: the module, which now sees such a parameter rounded to bfloat16, as
float32. Matrices of linear layers need nothing, since autocast casts them. So the residual stream is float32
everywhere. Invariant: a copy that stores parameters in bfloat16 gives the same numbers, bit for bit, as the float32
master copy. Gradients pass the rounding unchanged (a straight-through estimator).

Modules whose own code multiplies in float32 whatever the dtype of its input, such as the routers of DeepSeek-V3, run
without autocast, which would round what they have cast: experts are then chosen by scores of float32, as in
transformers.

Parameters that transformers keeps in float32 (`ParamSpec.float32`), such as the biases with which these routers choose
experts, are float32 in every copy, and are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.embeddings import CpuEmbedding
from rldsl.models.float32_products import float32_products


class _RoundToBfloat16(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def round_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """x rounded to bfloat16, as float32; its gradient is that of x, in one step of autograd."""
    out: torch.Tensor = _RoundToBfloat16.apply(x)
    return out


class _RoundedEmbedding(nn.Embedding):
    """Rounds the rows that are looked up, not the whole table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return round_to_bfloat16(super().forward(ids))


def round_parameter(module: nn.Module, attribute: str) -> None:
    """Make `module` compute with its parameter `attribute` rounded. The parameter itself stays as it is, in
    `module._parameters`."""
    if not isinstance(module, nn.Embedding):
        plain: type = type(module)
        module.__class__ = _with_property(plain, attribute)
        return
    embedding: type = type(module)
    module.__class__ = _with_rounded_lookup(embedding)
    for name, buffer in module.named_buffers(recurse=False):  # a scale, which families cast to the table's dtype
        setattr(module, name, buffer.bfloat16().float() if buffer.is_floating_point() else buffer)


@cache
def _with_property(kind: type, attribute: str) -> Any:
    """The class with the parameter as a property. kind: a class of modules."""
    return type(kind.__name__, (kind,),
                {attribute: property(lambda self: round_to_bfloat16(self._parameters[attribute]))})


@cache
def _with_rounded_lookup(kind: type) -> Any:
    """The class with `_RoundedEmbedding` between a family's own embedding and torch's, so that what the family does to
    the rows comes after the rounding."""
    plain = kind in (nn.Embedding, CpuEmbedding)
    return _RoundedEmbedding if plain else type(kind.__name__, (kind, _RoundedEmbedding), {})


def keep_float32_products(model: nn.Module, device: torch.device, float32: Collection[str] = ()) -> frozenset[str]:
    """Let modules with their own matrix that multiply in float32 in a model of half precision do so under
    autocast, too. Returns their names, and those of linear layers whose weights they multiply with. float32: names of
    parameters that are float32 in such a model."""
    found = float32_products(model, float32)
    for name in found:
        module = model.get_submodule(name)
        module.forward = _without_autocast(module.forward, device.type)
    return frozenset((*found, *(matrix.removesuffix(".weight") for matrix in found.values())))


def _without_autocast(forward: Callable[..., Any], device: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return forward(*args, **options)

    return run
