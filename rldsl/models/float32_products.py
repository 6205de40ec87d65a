"""Modules whose own code multiplies in float32 in a model of half precision, such as the routers of DeepSeek-V3.

In: modules of transformers, on any device. Out: which they are, found by running their code on shapes without numbers,
and the matrices that they multiply with. The backend runs these modules without autocast
(`backends/torch/model/autocast.py`); the memory estimate counts their matrices in float32.
"""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import Any


def float32_products(model: Any, float32: Collection[str] = ()) -> dict[str, str]:
    """Module -> the parameter of the model with which it multiplies in float32. float32: names of parameters that are
    float32 in a model of half precision."""
    tried: dict[tuple[type, frozenset[str]], bool] = {}
    found = {}
    for name, module in model.named_modules():
        matrix = matrix_name(module)
        if not matrix:
            continue
        own = frozenset(n for n, _ in module.named_parameters() if f"{name}.{n}" in float32)
        kind = type(module), own
        if kind not in tried:
            tried[kind] = multiplies_in_float32(module, own)
        if tried[kind]:
            found[name] = f"{name}.{matrix}"
    return found


def matrix_name(module: Any) -> str:
    """The name of the matrix [., H] that a module may multiply with in its own code: its parameter `weight`, or that of
    a linear layer that is all it has (LongCat's routers); "": there is none."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear | nn.Embedding | Conv1D | nn.Sequential | nn.ModuleList):
        return ""
    children = list(module.named_children())
    within = len(children) == 1 and type(children[0][1]) is nn.Linear and not module._parameters
    weight = (children[0][1] if within else module)._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return ""
    return f"{children[0][0]}.weight" if within else "weight"


def multiplies_in_float32(module: Any, float32: Collection[str] = ()) -> bool:
    """Whether a module with a matrix [., H] makes all its products in float32 where its parameters, but for some, and
    its input are bfloat16. float32: the names of these. What it needs besides its input is taken for numbers of
    experts, as many as the matrix has rows (biases of HY-V3's routers)."""
    import torch
    from torch.func import functional_call

    matrix = matrix_name(module)
    if not matrix:
        return False
    rows, width = module.get_parameter(matrix).shape
    values = {name: torch.empty_like(x, dtype=torch.float32 if name in float32 else torch.bfloat16, device="meta")
              for name, x in module.named_parameters()}
    values |= {name: x.to("meta") for name, x in module.named_buffers()}
    others = [torch.empty(rows, device="meta") for _ in range(_num_required(module) - 1)]
    for shape in ((1, 4, width), (4, width)):
        try:
            with torch.no_grad(), _product_dtypes() as seen:
                functional_call(module, values, (torch.empty(shape, dtype=torch.bfloat16, device="meta"), *others))
        except Exception:  # a module that needs more, or another shape
            continue
        return bool(seen.dtypes == {torch.float32})
    return False


def read_by_others(model: Any) -> frozenset[str]:
    """Linear layers with whose weights another module multiplies in its own code, without calling them: what is added
    to their outputs, as an adapter is, has no effect (LongCat's routers)."""
    return frozenset(f"{name}.{child}" for name, module in model.named_modules()
                     if (child := matrix_name(module).removesuffix("weight").removesuffix("."))
                     and not _calls(module, child))


def _calls(module: Any, child: str) -> bool:
    """Whether a forward pass calls a child, on shapes without numbers; also where the module needs more than that."""
    import torch
    from torch.func import functional_call

    called: list[Any] = []
    hook = module.get_submodule(child).register_forward_pre_hook(lambda *_: called.append(1))
    rows, width = module.get_submodule(child).weight.shape
    values = {name: torch.empty_like(x, dtype=torch.float32, device="meta") for name, x in module.named_parameters()}
    values |= {name: x.to("meta") for name, x in module.named_buffers()}
    others = [torch.empty(rows, device="meta") for _ in range(_num_required(module) - 1)]
    try:
        with torch.no_grad():
            functional_call(module, values, (torch.empty(4, width, device="meta"), *others))
    except Exception:  # a module that needs more
        return True
    finally:
        hook.remove()
    return bool(called)


def _num_required(module: Any) -> int:
    """Arguments that a module's forward pass cannot do without."""
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in signature(module.forward).parameters.values())


def _product_dtypes() -> Any:
    """A mode of torch that notes the dtypes of matrix products. dtypes: those so far."""
    from torch import ops
    from torch.utils._python_dispatch import TorchDispatchMode

    products = ops.aten.mm, ops.aten.addmm, ops.aten.bmm

    class ProductDtypes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch has no type hints here
            self.dtypes: set[Any] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket in products:
                self.dtypes.add(out.dtype)
            return out

    return ProductDtypes()
