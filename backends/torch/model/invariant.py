"""Numbers of a token that do not depend on what is computed beside it.

In: torch's functions, as modules and heads call them while a mode is on. Out: the same functions, with products of a
fixed number of rows at a time and attention over blocks of a fixed number of keys, whose sums are float32 and have one
order. A kernel chooses its way by shapes, so with fixed shapes a token gets the same numbers whether it is decoded
beside others or stands in a packed row: log-probs of generation are those of training, bit by bit. Norms, sums over the
vocabulary and embeddings work row by row and are left as they are; activations are made of exponentials, since torch's
own compute the last numbers of a tensor in another way than the rest. Products are as fast as without in backward
passes: a gradient need not be the same in two places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ROWS = 16  # of a product
KEYS = 64  # of attention


class Invariant(TorchFunctionMode):
    """While it is on, products and attention are computed in blocks of one size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """x [n, k] times right [k, m], a block of rows after the other."""

    @staticmethod
    def forward(ctx, x, right):
        ctx.save_for_backward(x, right)
        return torch.cat([part @ right for part in filled(x, ROWS).split(ROWS)])[: len(x)]

    @staticmethod
    def backward(ctx, slope):
        x, right = ctx.saved_tensors
        to_x = slope @ right.T if ctx.needs_input_grad[0] else None
        return to_x, x.T @ slope if ctx.needs_input_grad[1] else None


def product(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[..., k] times [k, m] -> [..., m]."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, right = x.to(dtype), right.to(dtype)
    return _Product.apply(x.reshape(-1, x.shape[-1]), right).view(*x.shape[:-1], right.shape[1])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    made = product(x, weight.T)
    return made if bias is None else made + bias.to(made.dtype)


def addmm(bias: torch.Tensor, x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    made = product(x, right)
    return made + bias.to(made.dtype)


def matmul(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of a matrix or a vector on the right side; what is a batch of products is not of tokens."""
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
    """q [S, H, T, D]; k, v [S, K, L, D], where each head of keys serves H / K heads of queries -> [S, H, T, D]. The
    mask is true, or 0, where a key is seen. Every score, every sum over a block of keys and every sum over blocks is
    made in the same way whatever S, T and L are; a block that is not seen adds 0."""
    (count, heads, tall, size), (groups, wide) = q.shape, k.shape[1:3]
    each, kind = heads // groups, q.dtype
    blocks = -(-wide // KEYS)
    rows = (q.float() * (size**-0.5 if scale is None else scale)).reshape(count * groups, each * tall, size)
    rows = filled(rows, ROWS, 1).unflatten(1, (-1, ROWS))  # [S K, blocks of rows, ROWS, D]
    keys, values = (filled(x.float(), KEYS, 2).reshape(count * groups, blocks, KEYS, size) for x in (k, v))
    seen = _seen(attn_mask, is_causal, tall, wide, q.device)  # [S or 1, T or 1, blocks * KEYS]
    seen = seen[:, None, None].expand(count, groups, each, tall, -1).reshape(count * groups, each * tall, -1)
    seen = filled(seen, ROWS, 1).unflatten(1, (-1, ROWS))
    scores = [torch.matmul(rows, keys[:, None, j].transpose(-1, -2)).masked_fill(
        ~seen[..., j * KEYS : (j + 1) * KEYS], -torch.inf) for j in range(blocks)]
    with torch.no_grad():
        peak = torch.stack([s.amax(-1, keepdim=True) for s in scores]).amax(0)
        peak = torch.where(peak == -torch.inf, 0.0, peak)  # rows that only fill up see nothing
    out = total = None
    for j, score in enumerate(scores):
        weights = (score - peak).exp()
        mass, part = weights.sum(-1, keepdim=True), torch.matmul(weights, values[:, None, j])
        total, out = (mass, part) if out is None else (total + mass, out + part)
    found = (out / total.clamp(min=torch.finfo(torch.float32).tiny)).flatten(1, 2)[:, : each * tall]
    return found.reshape(count, heads, tall, size).to(kind)


def _seen(mask: torch.Tensor | None, causal: bool, tall: int, wide: int, device: torch.device) -> torch.Tensor:
    """[S or 1, T or 1, wide, filled up to whole blocks] bool."""
    if mask is None:
        mask = torch.ones(1, tall, wide, dtype=torch.bool, device=device)
        mask = mask.tril() if causal else mask
    else:
        mask = mask if mask.dtype == torch.bool else mask == 0
        mask = mask.reshape(-1, *mask.shape[-2:])  # one for all heads
    return filled(mask, KEYS, 2)


def filled(x: torch.Tensor, unit: int, dim: int = 0) -> torch.Tensor:
    """A copy whose size along `dim` is a multiple of `unit`, with zeros."""
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, -x.shape[dim] % unit))


REPLACED: dict[Any, Callable[..., Any]] = {
    F.linear: linear, torch.addmm: addmm, torch.matmul: matmul, torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul, F.scaled_dot_product_attention: attend, F.silu: silu, F.gelu: gelu,
    torch.sigmoid: sigmoid, torch.Tensor.sigmoid: sigmoid, F.sigmoid: sigmoid}
