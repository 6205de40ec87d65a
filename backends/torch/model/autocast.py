"""What the modules of a model in bfloat16 compute with: the same numbers from every copy, float32 at its home or not.

In: a module with parameters of either dtype. Out: the module, which now gets them as bfloat16 rounds them and in
float32. Matrices of linear layers need nothing: autocast halves them. So the residual stream is float32 everywhere, and
a copy that is stored in bfloat16 gives its home's numbers bit by bit. Gradients pass the rounding as they are.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import nn


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, slope):
        return slope


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as bfloat16 has it, in float32; one step of autograd, whose gradient is that of x."""
    return _Rounded.apply(x)


class _Lookup(nn.Embedding):
    """Rounds the rows that are looked up, not the table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return rounded(super().forward(ids))


def compute_rounded(module: nn.Module, attribute: str) -> None:
    """Make `module` compute with its parameter `attribute` rounded. The parameter stays what it is, in
    `module._parameters`."""
    if not isinstance(module, nn.Embedding):
        module.__class__ = _with_property(module.__class__, attribute)
        return
    module.__class__ = _with_lookup(module.__class__)
    for name, buffer in module.named_buffers(recurse=False):  # a scale, which families cast to the table's dtype
        setattr(module, name, buffer.bfloat16().float() if buffer.is_floating_point() else buffer)


@cache
def _with_property(kind: type[nn.Module], attribute: str) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {attribute: property(lambda self: rounded(self._parameters[attribute]))})


@cache
def _with_lookup(kind: type[nn.Module]) -> type[nn.Module]:
    """Between a family's own embedding and torch's, so that what the family does to the rows comes after."""
    return _Lookup if kind is nn.Embedding else type(kind.__name__, (kind, _Lookup), {})
