"""Kernels for float32 on CPUs, each in one pass over memory where torch's operators take several.

In: plain tensors. Out: what the operators in the docstring of each function compute, but for rounding. `cpu_kernels.c`
has them. Where there is no compiled library (`kernel_library.py`) torch's operators run, as they do for tensors that
`takes` refuses and in invariant models, whose sums have an order of their own (`ordered_kernels.py`).

What is called while a decode step is captured is an operator of torch with the namespace `rldsl`, so that the trace
(`generate/op_trace.py`) has it; INTO and PLAIN say what a trace calls in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rldsl.backends.torch.kernels import operators
from rldsl.backends.torch.kernels.kernel_library import KernelCall, are_plain, available, check, library

HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128)  # of `decode_attention`
UNBOUNDED = 1 << 62  # a window that hides nothing


def takes(*tensors: torch.Tensor) -> bool:
    """Whether these have the type, the dtype and the order in memory that the kernels want."""
    return are_plain(*tensors) and all(x.is_contiguous() for x in tensors) and available()


# ------------------------------------------------------------------------------------------------------------ norms


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * scale * weight, scale) with scale = 1 / sqrt(mean(x^2) + eps) [..., 1]. x: [..., H]."""
    out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
    library().rms_norm(x.data_ptr(), weight.data_ptr(), scale.numel(), x.shape[-1], eps, out.data_ptr(),
                       scale.data_ptr())
    return out, scale


def rms_norm_backward(grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, of_x: bool,
                      of_weight: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and of the weight, as far as they are wanted. scale: of `normalized`."""
    grad_x, grad_weight = torch.empty_like(grad) if of_x else None, torch.empty_like(weight) if of_weight else None
    check(library().rms_norm_backward(grad.data_ptr(), x.data_ptr(), scale.data_ptr(), weight.data_ptr(), scale.numel(),
                                      weight.shape[0], _pointer(grad_x), _pointer(grad_weight)))
    return grad_x, grad_weight


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rms_norm_call(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> KernelCall:
    size = x.shape[-1]
    return KernelCall("rms_norm", (x, weight, x.numel() // size, size, eps, out, None))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _rms_norm_call(out, x, weight, eps)()
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, without a gradient."""
    out: torch.Tensor = operators.call(torch.ops.rldsl.rms_norm, _rms_norm, x, weight, eps)
    return out


# ------------------------------------------------------------------------------------------------ rotary embeddings


def _rotate_call(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False
                 ) -> KernelCall:
    _, heads, tokens, size = x.shape
    return KernelCall("rotary", (x, x.stride(1), x.stride(2), cos, sin, heads, tokens, size // 2, int(backward), out))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, or what brings its gradient back. x: [1, heads, T, D], whose last dimension is
    contiguous; cos, sin: [1, T, D]. The result has tokens before heads in memory."""
    _, heads, tokens, size = x.shape
    out = x.new_empty(1, tokens, heads, size).transpose(1, 2)
    _rotate_call(out, x, cos, sin, backward)()
    return out


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `rotate`, without a gradient."""
    out: torch.Tensor = operators.call(torch.ops.rldsl.rotary, rotate, x, cos, sin)
    return out


# --------------------------------------------------------------------------------------------- feed-forward layers


def _gate_call(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> KernelCall:
    return KernelCall("gated_product", (gate, up, gate.numel(), out))


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up"""
    out = torch.empty_like(gate)
    _gate_call(out, gate, up)()
    return out


def gate_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of both."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    library().gated_product_backward(gate.data_ptr(), up.data_ptr(), grad.data_ptr(), gate.numel(),
                                      grad_gate.data_ptr(), grad_up.data_ptr())
    return grad_gate, grad_up


def gated_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `gated`, without a gradient."""
    out: torch.Tensor = operators.call(torch.ops.rldsl.gated_product, gated, gate, up)
    return out


# --------------------------------------------------------------------------------------------------- vocabularies


def exp_sums(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """[N]: the sum of exp(x - peak) over the columns of x [N, V]. peak: [N]."""
    sums = torch.empty_like(peak)
    library().exp_sums(x.data_ptr(), peak.data_ptr(), *x.shape, sums.data_ptr())
    return sums


def softmax_sums(x: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] each: the largest of the columns of x [N, V], and the sum of exp(x - largest). keep: x becomes that."""
    peaks, sums = x.new_empty(len(x)), x.new_empty(len(x))
    library().softmax_sums(x.data_ptr(), *x.shape, keep, peaks.data_ptr(), sums.data_ptr())
    return peaks, sums


def scaled_probabilities(x: torch.Tensor, normalizer: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """exp(x - normalizer) * factor, in place. x: [N, V]; normalizer, factor: [N]."""
    library().scaled_probabilities(x.data_ptr(), normalizer.data_ptr(), factor.data_ptr(), *x.shape)
    return x


# ------------------------------------------------------------------------------------------------ decode attention


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `decode_attention` takes these."""
    return (q.shape[-1] in HEAD_SIZES and q.shape[-1] == v.shape[-1]
            and are_plain(q, k, v) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and available())


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                     positions: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Attention of one new token of each sequence to those before it and itself, whose keys and values it first writes
    to the cache. q: [H, S, D]; k, v: [K, S, D]; keys, values: [S, W, K, D], in memory [S, K, W, D]; positions: [S]
    int64. Returns [S, H, D]."""
    out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    operators.call(torch.ops.rldsl.decode_attention, _attend, q, k, v, keys, values, positions, scale,
                   window or UNBOUNDED, out)
    return out


def _attend_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                 positions: torch.Tensor, scale: float, window: int, out: torch.Tensor) -> KernelCall:
    heads, sequences, size = q.shape
    (q_head, q_seq, _), (k_head, k_seq, _), (v_head, v_seq, _) = q.stride(), k.stride(), v.stride()
    return KernelCall("decode_attention", (
        q, q_head, q_seq, k, k_head, k_seq, v, v_head, v_seq, keys, values, keys.stride(0), positions, sequences, heads,
        k.shape[0], keys.shape[1], size, scale, window, out))


def _attend(*arguments: Any) -> None:
    _attend_call(*arguments)()


# -------------------------------------------------------------------------------------------------------- KV cache


def writes(cache: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `write_tokens` takes these."""
    return are_plain(cache, x) and x.stride(-1) == 1 and cache.transpose(1, 2).is_contiguous() and available()


def write_tokens(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, columns: torch.Tensor,
                 source: torch.Tensor | None) -> None:
    """cache[slots[i], columns[i]] = x[:, source[i]] (x[:, i] without `source`). cache: [S, W, K, D], in memory
    [S, K, W, D]; x: [K, T, D]; slots, columns, source: [n] int64. Not for steps that are captured.
    Errors: IndexError for an unknown place; ValueError for other shapes and dtypes."""
    (heads, tokens, size), (num_slots, width, *rest) = x.shape, cache.shape
    places = (slots, columns) if source is None else (slots, columns, source)
    if rest != [heads, size] or any(p.dtype is not torch.int64 or p.shape != slots.shape or not p.is_contiguous()
                                    or not p.is_cpu for p in places):
        raise ValueError(f"tokens {tuple(x.shape)} do not go to a cache {tuple(cache.shape)} at such places")
    check(library().write_tokens(x.data_ptr(), x.stride(0), x.stride(1), tokens, _pointer(source), slots.data_ptr(),
                                 columns.data_ptr(), slots.numel(), heads, size, cache.data_ptr(), num_slots, width))


# -------------------------------------------------------------------------------------------------------- operators

_OPERATORS = torch.library.Library("rldsl", "DEF")
for _schema, _function in (
        ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm),
        ("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", rotate),
        ("gated_product(Tensor gate, Tensor up) -> Tensor", gated),
        ("decode_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, "
         "float scale, int window, Tensor(c!) out) -> ()", _attend)):
    _OPERATORS.define(_schema)
    _OPERATORS.impl(_schema.partition("(")[0], _function, "CPU")

# operator -> the same into results that exist: (results, arguments) -> the call
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.rms_norm.default: lambda out, args: _rms_norm_call(out, *args),
    torch.ops.rldsl.rotary.default: lambda out, args: _rotate_call(out, *args),
    torch.ops.rldsl.gated_product.default: lambda out, args: _gate_call(out, *args),
}
# operator that writes to its arguments -> the same without torch's dispatch: arguments -> the call
PLAIN: dict[Any, Callable[..., Callable[[], Any]]] = {torch.ops.rldsl.decode_attention.default: _attend_call}
