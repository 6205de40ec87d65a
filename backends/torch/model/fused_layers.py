"""Layers of a model family that run with fewer kernels on a GPU (`kernels/layer_kernels.py`).

In: the modules of a family. Out: the same modules; attention whose rotary embedding rotates halves of a head, and
feed-forward layers that compute down(silu(gate(x)) * up(x)), have another forward. Which these are is found by trying
them on a few numbers: others are left as they are, and so is every tensor that a kernel does not take.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import nn

ROTARY = "apply_rotary_pos_emb"  # what transformers calls it in the modules of all families
HALF_DTYPES = (torch.float16, torch.bfloat16)
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse_layers(skeleton: nn.Module, device: torch.device) -> list[str]:
    """Replace the forward of modules on a GPU where Triton can be used. Returns their names."""
    if device.type != "cuda" or find_spec("triton") is None:
        return []
    fused = []
    gated: dict[type, bool] = {}
    for name, module in skeleton.named_modules():
        kind = type(module)
        forward = kind.forward
        if all(isinstance(getattr(module, p, None), nn.Linear) for p in PROJECTIONS) and _rotates_halves(forward):
            module.forward = _attention_forward(module, forward)
            fused.append(name)
        elif {*module._modules} == {*GATED}:
            if kind not in gated:
                gated[kind] = _is_gated_product(module)
            if gated[kind]:
                module.forward = partial(gated_forward, module)
                fused.append(name)
    return fused


# ------------------------------------------------------------------------------------------------ rotary embeddings


@cache
def _rotates_halves(forward: Any) -> bool:
    """Whether a forward calls, by this name, a function that computes what the kernel does."""
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return False
    draw = torch.Generator(device="cpu").manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=draw, device="cpu") for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 3, 8, generator=draw, device="cpu")
    try:
        found = forward.__globals__[ROTARY](q, k, cos, sin)
    except Exception:  # a function with another signature, or for other shapes
        return False
    return len(found) == 2 and all(torch.allclose(a, _rotate(x, cos, sin), atol=1e-6)
                                   for a, x in zip(found, (q, k), strict=True))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


def _attention_forward(module: nn.Module, forward: FunctionType) -> Callable[..., Any]:
    """The module's forward with another function under the name of the rotary embedding. Its input is only read by
    projections: where nothing is differentiated it is cast once and not by each of them."""
    names = forward.__globals__
    mine = FunctionType(forward.__code__, {**names, ROTARY: partial(rotary, names[ROTARY])}, forward.__name__,
                        forward.__defaults__, forward.__closure__)
    mine.__kwdefaults__ = forward.__kwdefaults__

    def run(hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return mine(module, _cast_once(hidden_states), *rest, **options)

    return run


def rotary(plain: Rotary, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
           *more: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k: [1, heads, T, D]; cos, sin: [1, T, D]. Results have the dtype in which attention multiplies. plain: for
    what the kernel does not take."""
    fits = not more and not options and cos.dtype == sin.dtype == torch.float32 and len(q) == 1 and all(
        x.is_cuda and x.stride(-1) == 1 and x.shape[-2:] == cos.shape[-2:] and len(cos) == 1 and x.shape[-1] % 2 == 0
        for x in (q, k))
    if not fits:
        return plain(q, k, cos, sin, *more, **options)
    from rldsl.backends.torch.kernels.layer_kernels import RotaryFunction

    cos, sin = cos[0].contiguous(), sin[0].contiguous()
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    a, b = (RotaryFunction.apply(x[0], cos, sin, dtype or x.dtype)[None] for x in (q, k))
    return a, b


# -------------------------------------------------------------------------------------------- feed-forward layers


def gated_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x))"""
    x = _cast_once(x)
    gate, up = module.gate_proj(x), module.up_proj(x)
    out: torch.Tensor = module.down_proj(_gated_product(gate, up))
    return out


def _gated_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if gate.is_cuda and gate.dtype == up.dtype and gate.dtype in HALF_DTYPES and gate.shape == up.shape and \
            gate.is_contiguous() and up.is_contiguous():
        from rldsl.backends.torch.kernels.layer_kernels import GatedProductFunction

        out: torch.Tensor = GatedProductFunction.apply(gate, up)
        return out
    return nn.functional.silu(gate) * up


@torch.no_grad()
def _is_gated_product(module: nn.Module) -> bool:
    """Whether the module computes it, tried with small matrices in the place of its own."""
    trial: Any = copy(module)
    draw = torch.Generator(device="cpu").manual_seed(0)
    sizes = dict(zip(GATED, ((4, 6), (4, 6), (6, 4)), strict=False))
    linears = {name: nn.Linear(*size, bias=False, device="cpu") for name, size in sizes.items()}
    for linear in linears.values():
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=draw, device="cpu"))
    trial._modules = {**linears, "act_fn": module._modules["act_fn"]}
    x = torch.randn(5, 4, generator=draw, device="cpu")
    try:
        found = trial(x)
    except Exception:  # a module that needs more
        return False
    expected = linears["down_proj"](nn.functional.silu(linears["gate_proj"](x)) * linears["up_proj"](x))
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected, 1e-5)


def _cast_once(x: torch.Tensor) -> torch.Tensor:
    """The input of several products in the dtype to which autocast would cast it for each of them. With gradients they
    are summed in the wider dtype, as without this."""
    if torch.is_grad_enabled() or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
