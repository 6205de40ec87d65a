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
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from rldsl.backends.torch.kernels.autograd import Function


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
    return _RoundedEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, _RoundedEmbedding), {})


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


def keep_float32_products(model: nn.Module, device: torch.device, float32: Collection[str] = ()) -> frozenset[str]:
    """Let modules with their own matrix that multiply in float32 in a model of half precision do so under
    autocast, too. Returns their names, and those of linear layers whose weights they multiply with. float32: names of
    parameters that are float32 in such a model."""
    found: dict[tuple[type, frozenset[str]], bool] = {}
    names = []
    for name, module in model.named_modules():
        if matrix_of(module) is None:
            continue
        own = frozenset(n for n, _ in module.named_parameters() if f"{name}.{n}" in float32)
        kind = type(module), own
        if kind not in found:
            found[kind] = multiplies_in_float32(module, own)
        if found[kind]:
            module.forward = _without_autocast(module.forward, device.type)
            names += [name, *(f"{name}.{child}" for child, _ in module.named_children())]
    return frozenset(names)


def matrix_of(module: nn.Module) -> torch.Tensor | None:
    """The matrix [., H] that a module may multiply with in its own code: its parameter `weight`, or that of a linear
    layer that is all it has (LongCat's routers)."""
    children = list(module.children())
    owner = children[0] if len(children) == 1 and type(children[0]) is nn.Linear and not module._parameters else module
    weight = owner._parameters.get("weight")
    plain = isinstance(module, nn.Linear | nn.Embedding | Conv1D | nn.Sequential | nn.ModuleList)
    return None if plain or weight is None or weight.dim() != 2 else weight


def multiplies_in_float32(module: nn.Module, float32: Collection[str] = ()) -> bool:
    """Whether a module with a matrix [., H] makes all its products in float32 where its parameters, but for some, and
    its input are bfloat16. float32: the names of these. Its code runs on shapes without numbers. What it needs besides
    its input is taken for numbers of experts, as many as the matrix has rows (biases of HY-V3's routers)."""
    matrix = matrix_of(module)
    if matrix is None:
        return False
    rows, width = matrix.shape
    values = {name: torch.empty_like(x, dtype=torch.float32 if name in float32 else torch.bfloat16, device="meta")
              for name, x in module.named_parameters()}
    values |= {name: x.to("meta") for name, x in module.named_buffers()}
    others = [torch.empty(rows, device="meta") for _ in range(_num_required(module) - 1)]
    for shape in ((1, 4, width), (4, width)):
        try:
            with torch.no_grad(), _ProductDtypes() as seen:
                functional_call(module, values, (torch.empty(shape, dtype=torch.bfloat16, device="meta"), *others))
        except Exception:  # a module that needs more, or another shape
            continue
        return bool(seen.dtypes == {torch.float32})
    return False


def _num_required(module: nn.Module) -> int:
    """Arguments that a module's forward pass cannot do without."""
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in signature(module.forward).parameters.values())


class _ProductDtypes(TorchDispatchMode):
    """dtypes: of the matrix products so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no type hints here
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            self.dtypes.add(out.dtype)
        return out


def _without_autocast(forward: Callable[..., Any], device: str) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return forward(*args, **options)

    return run
