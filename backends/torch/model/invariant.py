"""Batch-invariant computation: the numbers of a token do not depend on the other tokens of its batch.

In: torch's functions, as modules and heads call them while a mode is on. Out: the same functions, with matrix products
of a fixed number of rows at a time, and attention over blocks of a fixed number of keys, summed in float32 and in one
order.

A kernel chooses its algorithm by shapes, so with fixed shapes a token gets the same numbers whether it is decoded in a
batch or is part of a packed row: log-probs of generation are those of training, bit for bit. Norms, sums over the
vocabulary and embeddings work row by row and are left as they are; activations are built from exponentials, since
torch's own compute the last elements of a tensor differently from the rest. Backward passes use plain products, which
are as fast as without: a gradient need not be the same in two places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rldsl.backends.torch.kernels.autograd import Function

ROWS = 16  # of a matrix product at a time
KEYS = 64  # of a block of attention


class Invariant(TorchFunctionMode):
    """While this mode is on, products and attention are computed in blocks of one size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


class _BlockedProduct(Function):
    """x [n, k] @ right [k, m], one block of rows after another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, right)
        return torch.cat([part @ right for part in pad_to_multiple(x, ROWS).split(ROWS)])[: len(x)]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, right = ctx.saved_tensors
        grad_x = grad @ right.T if ctx.needs_input_grad[0] else None
        return grad_x, x.T @ grad if ctx.needs_input_grad[1] else None


def product(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[..., k] @ [k, m] -> [..., m]."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, right = x.to(dtype), right.to(dtype)
    out: torch.Tensor = _BlockedProduct.apply(x.reshape(-1, x.shape[-1]), right)
    return out.view(*x.shape[:-1], right.shape[1])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [..., k]; weight: [m, k]; bias: [m] -> [..., m]."""
    out = product(x, weight.T)
    return out if bias is None else out + bias.to(out.dtype)


def addmm(bias: torch.Tensor, x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = product(x, right)
    return out + bias.to(out.dtype)


def matmul(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Blocked where the right side is a matrix or a vector; a batch of products has no tokens as its rows."""
    if right.dim() == 1:
        return product(x, right[:, None])[..., 0]
    return product(x, right) if right.dim() == 2 else torch.matmul(x, right)


def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return x / (1 + (-x).exp())


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return F.gelu(x)
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))  # sqrt(2 / pi)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None,
           is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> torch.Tensor:
    """Replaces `scaled_dot_product_attention`. q: [S, H, T, D]; k, v: [S, K, L, D] with H a multiple of K. Returns
    [S, H, T, D]. The mask is True, or 0, where a key is visible.

    Every score, every sum over a block of keys and every sum over blocks is computed in the same way whatever S, T and
    L are; a block without visible keys adds 0."""
    (count, heads, queries, size), (kv_heads, num_keys) = q.shape, k.shape[1:3]
    repeat, dtype = heads // kv_heads, q.dtype
    blocks = -(-num_keys // KEYS)
    rows = (q.float() * (size**-0.5 if scale is None else scale)).reshape(count * kv_heads, repeat * queries, size)
    rows = pad_to_multiple(rows, ROWS, 1).unflatten(1, (-1, ROWS))  # [S K, blocks of rows, ROWS, D]
    keys, values = (pad_to_multiple(x.float(), KEYS, 2).reshape(count * kv_heads, blocks, KEYS, size) for x in (k, v))
    visible = _visible(attn_mask, is_causal, queries, num_keys, q.device)  # [S or 1, T or 1, blocks * KEYS]
    visible = visible[:, None, None].expand(count, kv_heads, repeat, queries, -1)
    visible = visible.reshape(count * kv_heads, repeat * queries, -1)
    visible = pad_to_multiple(visible, ROWS, 1).unflatten(1, (-1, ROWS))
    scores = [torch.matmul(rows, keys[:, None, j].transpose(-1, -2)).masked_fill(
        ~visible[..., j * KEYS : (j + 1) * KEYS], -torch.inf) for j in range(blocks)]
    with torch.no_grad():
        peak = torch.stack([s.amax(-1, keepdim=True) for s in scores]).amax(0)
        peak = torch.where(peak == -torch.inf, 0.0, peak)  # padding rows see nothing

    def weighted(j: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (scores[j] - peak).exp()
        return weights.sum(-1, keepdim=True), torch.matmul(weights, values[:, None, j])

    total, out = weighted(0)
    for j in range(1, blocks):  # always in this order
        mass, part = weighted(j)
        total, out = total + mass, out + part
    out = (out / total.clamp(min=torch.finfo(torch.float32).tiny)).flatten(1, 2)[:, : repeat * queries]
    return out.reshape(count, heads, queries, size).to(dtype)


def _visible(mask: torch.Tensor | None, causal: bool, queries: int, num_keys: int, device: torch.device
             ) -> torch.Tensor:
    """[S or 1, T or 1, num_keys padded to complete blocks] bool."""
    if mask is None:
        mask = torch.ones(1, queries, num_keys, dtype=torch.bool, device=device)
        mask = mask.tril() if causal else mask
    else:
        mask = mask if mask.dtype == torch.bool else mask == 0
        mask = mask.reshape(-1, *mask.shape[-2:])  # one for all heads
    return pad_to_multiple(mask, KEYS, 2)


def pad_to_multiple(x: torch.Tensor, unit: int, dim: int = 0) -> torch.Tensor:
    """A copy whose size along `dim` is a multiple of `unit`, padded with zeros."""
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, -x.shape[dim] % unit))


REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: linear, torch.addmm: addmm, torch.matmul: matmul, torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul, F.scaled_dot_product_attention: attend, F.silu: silu, F.gelu: gelu,
    torch.sigmoid: sigmoid, torch.Tensor.sigmoid: sigmoid, F.sigmoid: sigmoid}
