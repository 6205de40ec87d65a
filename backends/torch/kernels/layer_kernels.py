"""Three steps of a decoder layer as one Triton kernel each: rotary embeddings of queries and keys, the gated product of
a feed-forward layer, and a norm with the casts around it. torch takes 14, 2 and 4 kernels, which a decode step of few
sequences cannot amortize.

In: tensors on a GPU. Out: what torch's operations give, rounded in the same places; only where a product and a sum are
one instruction may the last bit of a float32 differ.

Sources: rotary embeddings, Su et al. 2021 (arXiv:2104.09864), in the form that rotates halves of a head; gated
feed-forward layers, Shazeer 2020 (arXiv:2002.05202); root-mean-square norms, Zhang and Sennrich 2019
(arXiv:1910.07467).

Parameters of kernels are annotated with names of `tl` alone: Triton evaluates annotations, too, and refuses others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rldsl.backends.torch.kernels.autograd import Function

HEADS_AT_ONCE = 4
ELEMENTS_AT_ONCE = 1024


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _rotate(x: tl.tensor, y: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, token: tl.tensor,
            heads: tl.tensor, HALF: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr) -> None:
    """Some heads of one token. x: heads and tokens with these strides; y: [T, heads, 2 * HALF]. WIDE: HALF rounded up
    to a power of two. BACK: the gradient of x from that of y."""
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    inside = column < HALF
    seen = (row < heads)[:, None] & inside[None, :]
    at = cos + t * 2 * HALF + column, sin + t * 2 * HALF + column
    cos_low, sin_low = tl.load(at[0], mask=inside, other=0.0), tl.load(at[1], mask=inside, other=0.0)
    cos_high, sin_high = tl.load(at[0] + HALF, mask=inside, other=0.0), tl.load(at[1] + HALF, mask=inside, other=0.0)
    source = x + t * token + row.to(tl.int64)[:, None] * head + column[None, :]
    low = tl.load(source, mask=seen, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=seen, other=0.0).to(tl.float32)
    if BACK:
        first = low * cos_low[None, :] + high * sin_high[None, :]
        second = high * cos_high[None, :] - low * sin_low[None, :]
    else:
        first = low * cos_low[None, :] - high * sin_low[None, :]
        second = high * cos_high[None, :] + low * sin_high[None, :]
    target = y + (t * heads + row[:, None]) * 2 * HALF + column[None, :]
    tl.store(target, first.to(y.dtype.element_ty), mask=seen)
    tl.store(target + HALF, second.to(y.dtype.element_ty), mask=seen)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _gate(gate: tl.tensor, up: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = at < count
    a, b = tl.load(gate + at, mask=seen, other=0.0), tl.load(up + at, mask=seen, other=0.0)
    wide = a.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(a.dtype)  # rounded, as between two kernels
    tl.store(out + at, (silu.to(tl.float32) * b.to(tl.float32)).to(a.dtype), mask=seen)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _gate_backward(gate: tl.tensor, up: tl.tensor, grad: tl.tensor, grad_gate: tl.tensor, grad_up: tl.tensor,
                   count: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = at < count
    a, b, g = (tl.load(gate + at, mask=seen, other=0.0), tl.load(up + at, mask=seen, other=0.0),
               tl.load(grad + at, mask=seen, other=0.0))
    wide, above = a.to(tl.float32), g.to(tl.float32)
    share = 1 / (1 + tl.exp(-wide))
    silu = (wide * share).to(a.dtype).to(tl.float32)
    inner = (above * b.to(tl.float32)).to(a.dtype).to(tl.float32)
    tl.store(grad_up + at, (above * silu).to(a.dtype), mask=seen)
    tl.store(grad_gate + at, (inner * share * (1 + wide * (1 - share))).to(a.dtype), mask=seen)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no type hints
def _normalize(x: tl.tensor, weight: tl.tensor, out: tl.tensor, size: tl.tensor, eps: tl.tensor, WIDE: tl.constexpr
               ) -> None:
    """One row. The weight is rounded to the dtype of the result."""
    at = tl.arange(0, WIDE)
    seen, row = at < size, tl.program_id(0).to(tl.int64) * size
    values = tl.load(x + row + at, mask=seen, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    factor = tl.load(weight + at, mask=seen, other=0.0).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row + at, (values * scale * factor).to(out.dtype.element_ty), mask=seen)


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in that dtype, to which the weight is rounded, too.
    x: [..., H], contiguous; weight: [H] of any dtype. Without a gradient."""
    size = x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _normalize[(x.numel() // size,)](x, weight, out, size, eps, WIDE=triton.next_power_of_2(size))
    return out


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, back: bool) -> torch.Tensor:
    """x: [H, T, D], whose last dimension is contiguous; cos, sin: [T, D] float32, contiguous. Returns [H, T, D] of that
    dtype, in memory [T, H, D]. back: the gradient of the input from that of the result."""
    heads, tokens, size = x.shape
    out = torch.empty(tokens, heads, size, dtype=dtype, device=x.device)
    _rotate[tokens, triton.cdiv(heads, HEADS_AT_ONCE)](
        x, out, cos, sin, x.stride(0), x.stride(1), heads, HALF=size // 2, WIDE=triton.next_power_of_2(size // 2),
        ROWS=HEADS_AT_ONCE, BACK=back)
    return out.transpose(0, 1)


class RotaryFunction(Function):
    """(x [H, T, D], cos [T, D], sin [T, D], dtype of the result) -> [H, T, D]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotated(x, cos, sin, dtype, back=False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, ctx.dtype, back=True), None, None, None


class GatedProductFunction(Function):
    """(gate [...], up [...]) -> silu(gate) * up [...], all contiguous and of one dtype."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        out, count = torch.empty_like(gate), gate.numel()
        if count:
            _gate[(triton.cdiv(count, ELEMENTS_AT_ONCE),)](gate, up, out, count, BLOCK=ELEMENTS_AT_ONCE)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if count:
            _gate_backward[(triton.cdiv(count, ELEMENTS_AT_ONCE),)](gate, up, grad.contiguous(), grad_gate, grad_up,
                                                                    count, BLOCK=ELEMENTS_AT_ONCE)
        return grad_gate, grad_up
