"""Kernels for float32 on CPUs, each in one pass over memory where torch's operators take several.

In: plain tensors. Out: what the operators in the docstring of each function compute, but for rounding. `cpu_kernels.c`
has them, with those of `cpu_attention.py` in `cpu_attention.c`, which takes a second to compile at its first use of all
(`c_compiler.py`). Without a compiler or a cache folder there are none (`available`), and torch's operators run, as they
do for tensors that `takes` refuses and in invariant models, whose sums have an order of their own
(`ordered_kernels.py`).

What is called while a decode step is captured is an operator of torch with the namespace `rldsl`, so that the trace
(`generate/op_trace.py`) has it; INTO and PLAIN say what a trace calls in its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels import c_compiler, few_row_products
from rldsl.backends.torch.kernels.products import wide_product

SOURCE = Path(__file__).with_name("cpu_kernels.c")
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128)  # of `decode_attention`
UNBOUNDED = 1 << 62  # a window that hides nothing

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "rms_norm": (POINTER, POINTER, INT, INT, FLOAT, POINTER, POINTER, POINTER),
    "rms_norm_backward": (POINTER, POINTER, POINTER, POINTER, INT, INT, POINTER, POINTER),
    "rotary": (POINTER, INT, INT, POINTER, POINTER, INT, INT, INT, ctypes.c_int, POINTER),
    "gated_product": (POINTER, POINTER, INT, POINTER),
    "gated_product_backward": (POINTER, POINTER, POINTER, INT, POINTER, POINTER),
    "exp_sums": (POINTER, POINTER, INT, INT, POINTER),
    "softmax_sums": (POINTER, INT, INT, ctypes.c_int, POINTER, POINTER),
    "scaled_probabilities": (POINTER, POINTER, POINTER, INT, INT),
    "sample": (POINTER, POINTER, INT, INT, FLOAT, POINTER, POINTER),
    "decode_attention": (POINTER, INT, INT, POINTER, INT, INT, POINTER, INT, INT, POINTER, POINTER, INT, POINTER, INT,
                         INT, INT, INT, INT, FLOAT, INT, POINTER),
    "attention": (*(POINTER, INT, INT) * 3, POINTER, POINTER, *(INT,) * 5, FLOAT, INT, POINTER, POINTER),
    "attention_backward": (*(POINTER, INT, INT) * 4, POINTER, POINTER, *(INT,) * 5, FLOAT, INT, *(POINTER,) * 5),
}


@cache
def library() -> Any:
    """The compiled functions; None if they cannot be had."""
    return c_compiler.load(SOURCE, c_compiler.FAST_FLAGS, ARGUMENTS)


def available() -> bool:
    """Whether there are any. The first call may compile them."""
    return library() is not None


def takes(*tensors: torch.Tensor) -> bool:
    """Whether these have the type, the dtype and the order in memory that the kernels want."""
    return all(type(x) in (torch.Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu"
               and x.is_contiguous() for x in tensors) and available()


# ------------------------------------------------------------------------------------------------------------ norms


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float
               ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(n * weight, n, scale) with scale = 1 / sqrt(mean(x^2) + eps) [..., 1] and n = x * scale. x: [..., H]."""
    out, kept, scale = torch.empty_like(x), torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
    size = x.shape[-1]
    library().rms_norm(x.data_ptr(), weight.data_ptr(), scale.numel(), size, eps, out.data_ptr(), kept.data_ptr(),
                        scale.data_ptr())
    return out, kept, scale


def rms_norm_backward(grad: torch.Tensor, kept: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, of_x: bool,
                      of_weight: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x and of the weight, as far as they are wanted. kept, scale: of `normalized`."""
    grad_x, grad_weight = torch.empty_like(grad) if of_x else None, torch.empty_like(weight) if of_weight else None
    library().rms_norm_backward(grad.data_ptr(), kept.data_ptr(), scale.data_ptr(), weight.data_ptr(), scale.numel(),
                                 len(weight), _pointer(grad_x), _pointer(grad_weight))
    return grad_x, grad_weight


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rms_norm_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    size = x.shape[-1]
    library().rms_norm(x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps, out.data_ptr(), None, None)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _rms_norm_into(out, x, weight, eps)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, without a gradient."""
    out: torch.Tensor = torch.ops.rldsl.rms_norm(x, weight, eps)
    return out


# ------------------------------------------------------------------------------------------------ rotary embeddings


def _rotate_into(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False
                 ) -> None:
    _, heads, tokens, size = x.shape
    library().rotary(x.data_ptr(), x.stride(1), x.stride(2), cos.data_ptr(), sin.data_ptr(), heads, tokens, size // 2,
                      backward, out.data_ptr())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool = False) -> torch.Tensor:
    """x * cos + rotate_half(x) * sin, or what brings its gradient back. x: [1, heads, T, D], whose last dimension is
    contiguous; cos, sin: [1, T, D]. The result has tokens before heads in memory."""
    _, heads, tokens, size = x.shape
    out = x.new_empty(1, tokens, heads, size).transpose(1, 2)
    _rotate_into(out, x, cos, sin, backward)
    return out


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `rotate`, without a gradient."""
    out: torch.Tensor = torch.ops.rldsl.rotary(x, cos, sin)
    return out


# --------------------------------------------------------------------------------------------- feed-forward layers


def _gate_into(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None:
    library().gated_product(gate.data_ptr(), up.data_ptr(), gate.numel(), out.data_ptr())


def gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up"""
    out = torch.empty_like(gate)
    _gate_into(out, gate, up)
    return out


def gate_backward(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of both."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    library().gated_product_backward(gate.data_ptr(), up.data_ptr(), grad.data_ptr(), gate.numel(),
                                      grad_gate.data_ptr(), grad_up.data_ptr())
    return grad_gate, grad_up


def gated_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `gate`, without a gradient."""
    out: torch.Tensor = torch.ops.rldsl.gated_product(gate, up)
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


def _sample_into(out: tuple[torch.Tensor, torch.Tensor], hidden: torch.Tensor, head: torch.Tensor,
                 draws: torch.Tensor, temperature: float) -> None:
    if few_row_products.takes(hidden, head) and draws.is_contiguous():
        few_row_products.sample_into(out, hidden, head, draws, temperature)
        return
    table = wide_product(hidden, head).contiguous()
    library().sample(table.data_ptr(), draws.data_ptr(), *table.shape, temperature, *(x.data_ptr() for x in out))


def _sample(hidden: torch.Tensor, head: torch.Tensor, draws: torch.Tensor, temperature: float
            ) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(draws, dtype=torch.long), torch.empty_like(draws, dtype=hidden.dtype)
    _sample_into(out, hidden, head, draws, temperature)
    return out


def sample(hidden: torch.Tensor, head: torch.Tensor, draws: torch.Tensor, temperature: float
           ) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [S] int64 by `draws` [S] float64 in (0, 1) from softmax(hidden @ head.T / temperature), the first at which
    the cumulative sum exceeds the draw, and their log-probs [S]. hidden: [S, H]; head: [V, H]."""
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.rldsl.sample(hidden, head, draws, temperature)
    return out


# ------------------------------------------------------------------------------------------------ decode attention


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `decode_attention` takes these."""
    return (q.shape[-1] in HEAD_SIZES and q.shape[-1] == v.shape[-1]
            and all(type(x) is torch.Tensor and x.dtype == torch.float32 and x.device.type == "cpu"
                    and x.stride(-1) == 1 for x in (q, k, v)) and available())


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
                     positions: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Attention of one new token of each sequence to those before it and itself, whose keys and values it first writes
    to the cache. q: [H, S, D]; k, v: [K, S, D]; keys, values: [S, W, K, D], in memory [S, K, W, D]; positions: [S]
    int64. Returns [S, H, D]."""
    out = q.new_empty(q.shape[1], q.shape[0], q.shape[2])
    torch.ops.rldsl.decode_attention(q, k, v, keys, values, positions, scale, window or UNBOUNDED, out)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
            positions: torch.Tensor, scale: float, window: int, out: torch.Tensor) -> None:
    heads, sequences, size = q.shape
    (q_head, q_seq, _), (k_head, k_seq, _), (v_head, v_seq, _) = q.stride(), k.stride(), v.stride()
    if library().decode_attention(
            q.data_ptr(), q_head, q_seq, k.data_ptr(), k_head, k_seq, v.data_ptr(), v_head, v_seq, keys.data_ptr(),
            values.data_ptr(), keys.stride(0), positions.data_ptr(), sequences, heads, len(k), keys.shape[1], size,
            scale, window, out.data_ptr()):
        raise ValueError(f"no kernel for heads of {size}")


# -------------------------------------------------------------------------------------------------------- operators

_OPERATORS = torch.library.Library("rldsl", "DEF")
for _schema, _function in (
        ("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm),
        ("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", rotate),
        ("gated_product(Tensor gate, Tensor up) -> Tensor", gate),
        ("sample(Tensor hidden, Tensor head, Tensor draws, float temperature) -> (Tensor, Tensor)", _sample),
        ("decode_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, "
         "float scale, int window, Tensor(c!) out) -> ()", _attend)):
    _OPERATORS.define(_schema)
    _OPERATORS.impl(_schema.partition("(")[0], _function, "CPU")

# operator -> the same into results that exist: (results, arguments) -> the call
INTO: dict[Any, Callable[[Any, Any], Callable[[], Any]]] = {
    torch.ops.rldsl.rms_norm.default: lambda out, args: partial(_rms_norm_into, out, *args),
    torch.ops.rldsl.rotary.default: lambda out, args: partial(_rotate_into, out, *args),
    torch.ops.rldsl.gated_product.default: lambda out, args: partial(_gate_into, out, *args),
    torch.ops.rldsl.sample.default: lambda out, args: partial(_sample_into, tuple(out), *args),
}
# operator that writes to its arguments -> the same without torch's dispatch
PLAIN: dict[Any, Callable[..., Any]] = {torch.ops.rldsl.decode_attention.default: _attend}
