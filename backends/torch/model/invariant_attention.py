"""Attention over blocks of a fixed number of keys, summed in float32 and in one order, and its gradient.

In: queries, keys and values, as `scaled_dot_product_attention` gets them. Out: numbers of a token that depend on no
other sequence, head or later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rldsl.backends.torch.kernels import fixed_order
from rldsl.backends.torch.kernels.autograd import Function, outside_modes
from rldsl.backends.torch.kernels.ordered_kernels import KEYS
from rldsl.backends.torch.model.invariant_products import COLUMNS, ROWS, pad_to_multiple


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None,
           is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
           over_query_heads: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
    """Replaces `scaled_dot_product_attention`. q: [S, H, T, D]; k, v: [S, K, L, D] with H a multiple of K. Returns
    [S, H, T, D]. The mask is True, or 0, where a key is visible.

    Every score, every sum over a block of keys and every sum over blocks is computed in the same way whatever S, H, K,
    T and L are; a block without visible keys adds 0. The gradient computes the weights again: on a CPU by torch's
    kernel."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = _Attention.apply(q, k, v, attn_mask, is_causal, scale, over_query_heads)
    return out


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
                scale: float, over_query_heads: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
        ctx.options = causal, scale, over_query_heads
        with outside_modes(), torch.autocast(q.device.type, enabled=False):
            _, blocks, peak, total = _softmax_blocks(q, k, mask, causal, scale)
            out = _by_head(_weighted_values(blocks, v).div_(total), q).to(q.dtype)
            # log of the sum of exp(score), as torch's kernel for the gradient has it
            logs = _by_head(peak + total.log(), q[..., :1])[..., 0] if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(q, k, v, mask, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, mask, out, logs = ctx.saved_tensors
        causal, scale, over_query_heads = ctx.options
        dtype = inputs[0].dtype
        if over_query_heads is not None:
            repeat = inputs[0].shape[1] // inputs[1].shape[1]
            inputs = [inputs[0], *(x.repeat_interleave(repeat, 1) for x in inputs[1:])]
        if fixed_order.needed(grad) or inputs[0].shape[-1] != inputs[2].shape[-1]:
            of_q, *of_kv = _blocked_gradient(inputs[0], inputs[1], inputs[2], mask, causal, scale, grad)
        else:
            of_q, *of_kv = _fused_gradient([x.float() for x in inputs], mask, causal, scale, out.float(), logs,
                                           grad.float())
        if over_query_heads is not None:
            of_kv = [over_query_heads(x.float()) for x in of_kv]
        return of_q.to(dtype), *(x.to(dtype) for x in of_kv), None, None, None, None


def _fused_gradient(inputs: list[torch.Tensor], mask: torch.Tensor | None, causal: bool, scale: float,
                    out: torch.Tensor, logs: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
    """By torch's kernel, in float32, where it takes less than half of its time in bfloat16. Each sequence and head has
    the same gradients whatever others there are. logs: [S, H, T], of sums of exp(score)."""
    heads, kv_heads = inputs[0].shape[1], inputs[1].shape[1]
    if mask is not None:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf) \
            if mask.dtype == torch.bool else mask.float()
        mask = mask if mask.dim() in (2, 4) else mask[:, None]
    q, *kv = inputs if heads == kv_heads else [
        inputs[0], *(x.repeat_interleave(heads // kv_heads, 1) for x in inputs[1:])]
    of_q, *of_kv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, *kv, out, logs, 0.0, causal, attn_mask=mask, scale=scale)
    return of_q, *(x if heads == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2) for x in of_kv)


def _weighted_values(blocks: list[tuple[int, torch.Tensor]], v: torch.Tensor) -> torch.Tensor:
    """[groups, rows, D]: the sum over keys of weights * v."""
    out = _batched(blocks[0][1], _block(v, 0))
    for i, (start, weights) in enumerate(blocks[1:], 1):  # always in this order
        out[:, start:] += _batched(weights, _block(v, i * KEYS))
    return out


def _softmax_blocks(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
                    ) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]], torch.Tensor, torch.Tensor]:
    """The queries of the heads that share a key are the rows of a product, position by position: under a causal mask a
    block of keys needs no row before its own first position. There are more rows, up to a multiple of ROWS, whose
    numbers are not used. Returns scaled queries [groups, rows, D]; for each block of keys the first row that sees any,
    and weights exp(score - largest) [groups, rows from there, KEYS]; the largest scores and the sums of the weights,
    which are not 0 [groups, rows, 1]."""
    (count, heads, queries, _), (kv_heads, num_keys) = q.shape, k.shape[1:3]
    repeat, number = heads // kv_heads, torch.finfo(torch.float32)
    rows = pad_to_multiple(_by_key(q.float() * scale, kv_heads), ROWS, 1)
    hidden = ~_visible(mask, causal, queries, num_keys, q.device)  # [S or 1, T, blocks * KEYS]
    scores: list[tuple[int, torch.Tensor]] = []
    peak = rows[..., :1]
    for first in range(0, num_keys, KEYS):
        start = first if causal else 0
        block = _batched(rows[:, start * repeat :], _block(k, first).transpose(1, 2))
        block[:, : (queries - start) * repeat].unflatten(1, (-1, repeat)).unflatten(0, (count, kv_heads)).masked_fill_(
            hidden[:, None, start:, None, first : first + KEYS], -torch.inf)
        largest = block.amax(-1, keepdim=True)
        if first:
            torch.maximum(peak[:, start * repeat :], largest, out=peak[:, start * repeat :])
        else:
            peak = largest
        scores.append((start * repeat, block))
    peak.clamp_(min=number.min)  # rows that see nothing
    totals = []
    for start, block in scores:  # always in this order
        block.sub_(peak[:, start:]).exp_()
        totals.append(fixed_order.row_sum(block, keepdim=True))
        if len(totals) > 1:
            totals[0][:, start:] += totals[-1]
    return rows, scores, peak, totals[0].clamp_(min=number.tiny)


def _blocked_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
                      scale: float, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, as they are, from that of the result [S, H, T, D]; sums over keys block by block,
    sums over queries in the order of their positions."""
    num_keys = k.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        rows, blocks, _, total = _softmax_blocks(q, k, mask, causal, scale)
        of_out = pad_to_multiple(_by_key(grad.float(), k.shape[1]), ROWS, 1)
        of_q = torch.zeros_like(rows)
        mean = fixed_order.row_sum(of_out * _weighted_values(blocks, v).div_(total), keepdim=True)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, (start, weights) in enumerate(blocks):
            shares, seen = weights / total[:, start:], of_out[:, start:]
            of_scores = shares * (_batched(seen, _block(v, i * KEYS).transpose(1, 2)) - mean[:, start:])
            of_q[:, start:] += _batched(of_scores, _block(k, i * KEYS))
            parts.append((_batched(of_scores.transpose(1, 2), rows[:, start:]),
                          _batched(shares.transpose(1, 2), seen)))
    of_k, of_v = (torch.cat(each, 1).unflatten(0, k.shape[:2])[:, :, :num_keys] for each in zip(*parts, strict=True))
    return _by_head(of_q * scale, q).to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def _by_key(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[S, H, T, D] -> [S * K, T * H / K, D]"""
    out: torch.Tensor = x.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(2, 3).flatten(0, 1)
    return out


def _by_head(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `_by_key`, without what was padded."""
    (count, heads, queries, _), groups = like.shape, x.shape[0]
    kv_heads = groups // count
    x = x[:, : queries * heads // kv_heads]
    out: torch.Tensor = x.unflatten(1, (queries, -1)).unflatten(0, (count, kv_heads)).transpose(2, 3)
    return out.reshape(like.shape)


def _block(x: torch.Tensor, first: int) -> torch.Tensor:
    """[S, K, L, D] -> [S * K, KEYS, D] float32, of the keys or values from `first` on; padded with zeros."""
    return pad_to_multiple(x[:, :, first : first + KEYS].float(), KEYS, 2).flatten(0, 1)


def _batched(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[G, n, k] @ [G, k, m] -> [G, n, m], contiguous."""
    if fixed_order.needed(x):
        return fixed_order.products(x, right)
    n, m = x.shape[1], right.shape[2]
    if m % COLUMNS:
        right = pad_to_multiple(right, COLUMNS, 2)
    return torch.bmm(pad_to_multiple(x, ROWS, 1), right)[:, :n, :m].contiguous()


def _visible(mask: torch.Tensor | None, causal: bool, queries: int, num_keys: int, device: torch.device
             ) -> torch.Tensor:
    """[S or 1, T, num_keys padded to complete blocks] bool."""
    if mask is None:
        mask = torch.ones(1, queries, num_keys, dtype=torch.bool, device=device)
        mask = mask.tril() if causal else mask
    else:
        mask = mask if mask.dtype == torch.bool else mask == 0
        mask = mask.reshape(-1, *mask.shape[-2:]).expand(-1, queries, -1)  # one for all heads
    return pad_to_multiple(mask, KEYS, 2)
