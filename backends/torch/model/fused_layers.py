"""Layers of a model family that run with fewer kernels: on a GPU (`kernels/layer_kernels.py`), and on a CPU
(`kernels/cpu_rotary.py`, `kernels/cpu_kernels.py`).

In: the modules of a family. Out: the same modules; attention whose rotary embedding rotates halves of a head,
feed-forward layers that compute down(silu(gate(x)) * up(x)), and norms whose results only these two read, have another
forward. Which these are is found by trying them on a few numbers: others are left as they are, and so is every tensor
that a kernel does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels import cpu_kernels, ordered_kernels
from rldsl.backends.torch.kernels.autograd import Function
from rldsl.backends.torch.kernels.cpu_rotary import angles, has_angles, rotate, takes
from rldsl.backends.torch.kernels.linear_layers import SharedInput, outputs
from rldsl.models.rotary import ROTARY, forward_rotates_halves
from rldsl.models.trials import PROJECTIONS, has_projections

FIXED_FREQUENCIES = ("default", "linear", "llama3", "yarn")  # kinds of angles that do not depend on how many there are
HALF_DTYPES = (torch.float16, torch.bfloat16)
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")

PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def fuse_layers(skeleton: nn.Module, device: torch.device, norms: Collection[str] = ()) -> list[str]:
    """Replace the forward of modules on a GPU where Triton can be used, and on a CPU. Returns their names.
    norms: names of those that are root-mean-square norms with a plain weight."""
    if device.type == "cpu":
        attentions = _fuse_rotary(skeleton, cpu_rotary)
        for name in attentions:
            SharedInput([skeleton.get_submodule(f"{name}.{p}") for p in PROJECTIONS])
        return [*_fuse_angles(skeleton), *attentions, *_fuse_gates(skeleton)]
    if device.type != "cuda" or find_spec("triton") is None:
        return []
    fused = []
    for name, module in skeleton.named_modules():
        forward = type(module).forward
        if has_projections(module) and forward_rotates_halves(forward):
            module.forward = _attention_forward(module, forward)
            fused.append(name)
    fused += _fuse_gates(skeleton)
    pre_norm: dict[type, bool] = {}
    for name, layer in skeleton.named_modules():
        if {*layer._modules} != {*PARTS} or not {f"{name}.self_attn", f"{name}.mlp"} <= {*fused}:
            continue
        kind = type(layer)
        if kind not in pre_norm:
            pre_norm[kind] = _is_pre_norm(layer)
        for part in PARTS[2:] if pre_norm[kind] else ():
            if f"{name}.{part}" in norms:
                norm = layer.get_submodule(part)
                norm.forward = _norm_forward(norm, norm.forward)
                fused.append(f"{name}.{part}")
    return fused


def fuse_ordered_layers(skeleton: nn.Module) -> list[str]:
    """Replace the forward of modules of an invariant model on a CPU by one with the same bits. Returns their names."""
    return _fuse_rotary(skeleton, ordered_rotary, exact=True)


# ------------------------------------------------------------------------------------------------ rotary embeddings


def _fuse_angles(skeleton: nn.Module) -> list[str]:
    """Compute the cosines and sines of positions on a CPU in one kernel. Returns the names of modules that do it."""
    fused = []
    for name, module in skeleton.named_modules():
        if getattr(module, "rope_type", None) in FIXED_FREQUENCIES and _computes_angles(module):
            module.forward = partial(angles_forward, module, module.forward)
            fused.append(name)
    return fused


def angles_forward(module: Any, plain: Callable[..., Any], x: torch.Tensor, position_ids: torch.Tensor, *more: Any,
                   **options: Any) -> Any:
    """What `plain` computes: cosines and sines of position_ids [B, T], [B, T, D] each with x's dtype. Positions in
    images have a third dimension, which the family reads as it does."""
    fits = position_ids.dim() == 2 and x.dtype is torch.float32 and has_angles(position_ids, module.inv_freq)
    if more or options or not fits:
        return plain(x, position_ids, *more, **options)
    return angles(position_ids, module.inv_freq, float(module.attention_scaling))


@torch.no_grad()
def _computes_angles(module: nn.Module) -> bool:
    """Whether a module computes what the kernel does, tried with frequencies in place of its own."""
    frequencies = module._buffers.get("inv_freq")
    if frequencies is None or not isinstance(getattr(module, "attention_scaling", None), int | float):
        return False
    trial: Any = copy(module)
    trial._buffers = dict.fromkeys(module._buffers, torch.logspace(0, -4, len(frequencies), device="cpu"))
    positions = torch.tensor([[0, 1, 2, 3, 100, 1000, 8191]], device="cpu")
    if not has_angles(positions, trial.inv_freq):
        return False
    try:
        found = trial(torch.zeros(1, 7, 8, device="cpu"), positions)
    except Exception:  # a module with another signature
        return False
    expected = angles(positions, trial.inv_freq, float(trial.attention_scaling))
    return isinstance(found, tuple) and len(found) == 2 and all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


def _fuse_rotary(skeleton: nn.Module, function: Callable[..., Any], exact: bool = False) -> list[str]:
    """Replace that of attention on a CPU, in all modules that compute what the function does. exact: bit for bit."""
    fused = []
    for name, module in skeleton.named_modules():
        forward = type(module).forward
        if has_projections(module) and forward_rotates_halves(forward, exact):
            module.forward = partial(_with_rotary(forward, function), module)
            fused.append(name)
    return fused


def _attention_forward(module: nn.Module, forward: FunctionType) -> Callable[..., Any]:
    """The module's forward with another function under the name of the rotary embedding. Its input is only read by
    projections: where nothing is differentiated it is cast once and not by each of them."""
    mine = _with_rotary(forward, rotary)

    def run(hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return mine(module, _cast_once(hidden_states), *rest, **options)

    return run


def _with_rotary(forward: FunctionType, function: Callable[..., Any]) -> FunctionType:
    """The forward with `function` under the name of the rotary embedding; it gets the family's own first."""
    names = forward.__globals__
    mine = FunctionType(forward.__code__, {**names, ROTARY: partial(function, names[ROTARY])}, forward.__name__,
                        forward.__defaults__, forward.__closure__)
    mine.__kwdefaults__ = forward.__kwdefaults__
    return mine


def cpu_rotary(plain: Rotary, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
               *more: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rotary`; of float32 numbers on a CPU."""
    if more or options or not takes(q, k, cos, sin):
        return plain(q, k, cos, sin, *more, **options)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def ordered_rotary(plain: Rotary, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                   *more: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What `plain` computes, bit for bit."""
    if more or options or torch.is_grad_enabled() or not all(ordered_kernels.rotates(x, cos, sin) for x in (q, k)):
        return plain(q, k, cos, sin, *more, **options)
    return ordered_kernels.rotary(q, cos, sin), ordered_kernels.rotary(k, cos, sin)


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


def _fuse_gates(skeleton: nn.Module) -> list[str]:
    fused = []
    gated: dict[type, bool] = {}
    for name, module in skeleton.named_modules():
        kind = type(module)
        if {*module._modules} == {*GATED}:
            if kind not in gated:
                gated[kind] = _is_gated_product(module)
            if gated[kind]:
                module.forward = partial(gated_forward, module)
                fused.append(name)
    return fused


def gated_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x))"""
    x = _cast_once(x)
    gate, up = outputs(x, (module.gate_proj, module.up_proj))
    out: torch.Tensor = module.down_proj(_gated_product(gate, up))
    return out


def _gated_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor
    if gate.is_cuda and gate.dtype == up.dtype and gate.dtype in HALF_DTYPES and gate.shape == up.shape and \
            gate.is_contiguous() and up.is_contiguous():
        from rldsl.backends.torch.kernels.layer_kernels import GatedProductFunction

        out = GatedProductFunction.apply(gate, up)
    elif gate.shape == up.shape and cpu_kernels.takes(gate, up):
        out = CpuGatedProduct.apply(gate, up) if torch.is_grad_enabled() else cpu_kernels.gated_product(gate, up)
    else:
        out = nn.functional.silu(gate) * up
    return out


class CpuGatedProduct(Function):
    """(gate [...], up [...]) -> silu(gate) * up [...], by `cpu_kernels`."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return cpu_kernels.gated(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return cpu_kernels.gate_backward(gate, up, grad.contiguous())


@torch.no_grad()
def _is_gated_product(module: nn.Module) -> bool:
    """Whether the module computes it, tried with small matrices in place of its weights."""
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


# ------------------------------------------------------------------------------------------------------------ norms


class _Affine(nn.Module):
    """In the place of a part of a layer: a distinct function, which commutes with no other, so that the result says
    what was computed from what."""

    def __init__(self, factor: float, alone: bool) -> None:
        super().__init__()
        self.factor, self.alone = factor, alone

    def forward(self, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        out = hidden_states * self.factor + 1 / self.factor
        return out if self.alone else (out, None)


@torch.no_grad()
def _is_pre_norm(layer: nn.Module) -> bool:
    """Whether a layer computes y = x + attention(norm(x)) and then y + mlp(norm(y)), and so reads the results of its
    norms nowhere else."""
    trial: Any = copy(layer)
    trial._modules = {part: _Affine(factor, part != "self_attn") for part, factor in
                      zip(PARTS, (3.0, 7.0, 2.0, 5.0), strict=True)}
    attend, mlp, first, second = trial._modules.values()
    x = torch.linspace(-1, 2, 12, device="cpu").view(1, 3, 4)
    try:
        found = type(layer).forward(trial, hidden_states=x)
    except Exception:  # a layer that needs more
        return False
    found = found[0] if isinstance(found, tuple) else found
    attended = x + attend(first(x))[0]
    expected = attended + mlp(second(attended))
    return isinstance(found, torch.Tensor) and found.shape == x.shape and torch.allclose(found, expected)


def _norm_forward(norm: Any, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What is read by products alone is rounded at once to the dtype in which they multiply, where nothing is
    differentiated."""
    eps: float = getattr(norm, "variance_epsilon", None) or norm.eps

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        if torch.is_grad_enabled() or not x.is_cuda or not torch.is_autocast_enabled("cuda") or not x.is_contiguous():
            return plain(x)
        if not isinstance(getattr(type(norm), "weight", None), property):  # a weight that is float32 in every copy
            return plain(x)
        from rldsl.backends.torch.kernels.layer_kernels import normalized

        # the parameter itself: `norm.weight` may be a property that rounds it (`model/autocast.py`)
        return normalized(x, norm._parameters["weight"], eps, torch.get_autocast_dtype("cuda"))

    return forward
