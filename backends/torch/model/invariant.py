"""Batch-invariant computation: the numbers of a token do not depend on the other tokens of its batch, nor on the
columns of a weight that tensor parallelism leaves on this rank.

In: torch's functions, as modules and heads call them while a mode is on. Out: the same functions, with matrix products
whose rows and columns are padded to fixed multiples, and attention over blocks of a fixed number of keys, summed in
float32 and in one order.

A kernel chooses its algorithm by shapes: products of few rows or columns, or with a few left over on a thread, are
summed in another order. Whole multiples of ROWS and COLUMNS are not, on the processors that we know; that this is true
here is tried before a model is used (`invariant_probe.py`). So a token gets the same numbers whether it is decoded in a
batch or is part of a packed row: log-probs of generation are those of training, bit for bit. Sums that tp divides are
cut into blocks (`sharding/sum_blocks.py`) and added in one tree (`tree_sums.py`). Norms and embeddings work row by row
and are left as they are. torch's activations compute the last elements of a tensor differently from the rest: SiLU gets
whole vectors, sigmoid and GELU are built from other functions. Backward passes use plain products, which are as fast as
without: a gradient need not be the same in two places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rldsl.backends.torch.kernels import fixed_order
from rldsl.backends.torch.kernels.autograd import Function, outside_modes
from rldsl.backends.torch.kernels.ordered_kernels import KEYS
from rldsl.backends.torch.kernels.products import onednn_is_faster, ordered_product
from rldsl.backends.torch.model.row_groups import RowGroups, sum_over_groups
from rldsl.backends.torch.model.weight_copies import NO_COPIES, WeightCopies

ROWS, COLUMNS = 4, 16  # a matrix product has whole multiples of both
HALF_PRODUCT = 1 << 12  # multiplications up to which torch uses another kernel in bfloat16
VECTORS = 64       # elements of a whole number of a CPU's vectors, as its kernels read them
THREAD_RUN = 1 << 15  # elements up to which torch lets one thread compute an operation


class Invariant(TorchFunctionMode):
    """While this mode is on, products have fixed multiples of rows and columns and attention has blocks of one size."""

    def __init__(self, over_query_heads: Callable[[torch.Tensor], torch.Tensor] | None = None,
                 row_groups: Callable[[], RowGroups] = tuple, copies: WeightCopies = NO_COPIES):
        """over_query_heads: with it the gradient of keys and values does not depend on which heads are on this rank
        (`gradient_sums.py`). row_groups: those of the pass under way, by which gradients are summed. copies: of
        weights."""
        super().__init__()
        self.over_query_heads, self.row_groups, self.copies = over_query_heads, row_groups, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HANDLED:
            return func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}) | {"over_query_heads": self.over_query_heads})
        groups = self.row_groups() if torch.is_grad_enabled() else ()
        if func is F.linear:
            return partial(linear, groups=groups, copies=self.copies)(*args, **(kwargs or {}))
        if func in GROUPED:
            return GROUPED[func](*args, **(kwargs or {}), groups=groups)
        if func in fixed_order.REDUCTIONS and (compute := fixed_order.replacement(func, args, kwargs or {})):
            return compute()
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def multiply(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[n, k] @ [k, m] -> [n, m]."""
    if fixed_order.needed(x):
        return fixed_order.products(x, right)
    if x.dtype != torch.float32 and _rounds_by_shape(x.device.type):
        # a product of two bfloat16 numbers is exact in float32, so only the order of the sums is another one
        return multiply(x.float(), right.float()).to(x.dtype)
    (count, size), width = x.shape, right.shape[1]
    if x.dtype == torch.float32 and onednn_is_faster():
        # one row or one column has another order of sums, every other number the same
        few = count < ROWS or width < COLUMNS
        out = ordered_product(pad_to_multiple(x, ROWS) if count < ROWS else x,
                              pad_to_multiple(right.T, COLUMNS) if width < COLUMNS else right.T)
        return out[:count, :width] if few else out
    x, whole = pad_to_multiple(x, ROWS), width // COLUMNS * COLUMNS
    if x.dtype != torch.float32 and len(x) * size * COLUMNS <= HALF_PRODUCT:
        x = pad_to_multiple(x, HALF_PRODUCT // (size * COLUMNS) // ROWS * ROWS + ROWS)
    if whole == width:
        return torch.mm(x, right)[:count]
    rest = torch.mm(x, pad_to_multiple(right.T[whole:], COLUMNS).T)  # in the memory order of the other columns
    if not whole:
        return rest[:count, :width]
    return torch.cat([torch.mm(x, right[:, :whole]), rest[:, : width - whole]], 1)[:count]


@cache
def _rounds_by_shape(device: str) -> bool:
    """Whether kernels for products of bfloat16 numbers add in an order that depends on the shapes, as those of CPUs
    without AVX-512 do for the gradients of weights."""
    return device == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")


def weight_gradient(x: torch.Tensor, grad: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """x [n, k], grad [n, m] -> grad.T @ x [m, k]: that of a weight of a linear layer. Its rows and columns are padded
    where the rows of x and of grad are contiguous, so that a kernel sees them in one memory order. groups: of the rows;
    the gradient of several leaves is float32."""
    def part(rows: slice) -> torch.Tensor:
        return multiply(pad_to_multiple(grad[rows], ROWS, 1).T, x[rows])[: grad.shape[1]]

    total = sum_over_groups(groups or ((len(x),),), part, x.dtype)
    return x.new_zeros(grad.shape[1], x.shape[1]) if total is None else total


def sum_of_rows(x: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """[n, m] float32 -> [m]. torch's own sum of a column depends on the columns next to it. groups: as of
    `weight_gradient`."""
    groups = groups or ((len(x),),)
    total = sum_over_groups(groups, sums_of_groups(x, groups), x.dtype)
    return x.new_zeros(x.shape[1]) if total is None else total


def sums_of_groups(x: torch.Tensor, groups: RowGroups) -> Callable[[slice], torch.Tensor]:
    """(the rows of a group) -> the sum of these rows of x [n, m], whose storage is reused."""
    if x.device.type != "cpu" or fixed_order.needed(x):
        return lambda rows: multiply(x.new_ones(1, rows.stop - rows.start), x[rows])[0]
    # as rows of embeddings: one row after the other, all groups in one call
    sizes = [size for leaf in groups for size in leaf if size]
    at = torch.arange(len(sizes), device=x.device).repeat_interleave(torch.tensor(sizes, device=x.device))
    sums = torch.ops.aten.embedding_dense_backward(x, at, len(sizes), -1, False)
    place = {first: i for i, first in enumerate(accumulate(sizes[:-1], initial=0))}
    return lambda rows: sums[place[rows.start]]


class _Product(Function):
    """x [n, k] @ right [k, m]. read: `right`, as it multiplies, without a gradient: that of `right` is not rounded
    to its dtype where several leaves are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, right: torch.Tensor, read: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(x, read)
        ctx.groups = groups
        return multiply(x, read)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, read = ctx.saved_tensors
        grad_x = multiply(grad, read.T) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(grad, x, ctx.groups) if ctx.needs_input_grad[1] else None, None, None


def product(x: torch.Tensor, right: torch.Tensor, groups: RowGroups = (), read: torch.Tensor | None = None
            ) -> torch.Tensor:
    """[..., k] @ [k, m] -> [..., m]. groups: of the rows, in the gradient of `right`. read: a copy of `right` without
    gradient, in the dtype of products; None: made here."""
    if read is None:
        read = NO_COPIES.cast(right, product_dtype(x))
    out: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]).to(read.dtype), right, read, groups)
    return out.view(*x.shape[:-1], right.shape[1])


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """In which products of x multiply."""
    on = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if on else x.dtype


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, groups: RowGroups = (),
           copies: WeightCopies = NO_COPIES) -> torch.Tensor:
    """x: [..., k]; weight: [m, k]; bias: [m] -> [..., m]."""
    return add_bias(product(x, weight.T, groups, copies.cast(weight, product_dtype(x)).T), bias, groups)


def addmm(bias: torch.Tensor, x: torch.Tensor, right: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """bias: [m]; x: [n, k]; right: [k, m] -> [n, m]. Models whose weights are [in, out] use it (GPT-2)."""
    return add_bias(product(x, right, groups), bias, groups)


def matmul(x: torch.Tensor, right: torch.Tensor, groups: RowGroups = ()) -> torch.Tensor:
    """Padded where the right side is a matrix or a vector; a batch of products has no tokens as its rows."""
    if right.dim() == 1:
        return product(x, right[:, None], groups)[..., 0]
    if right.dim() == 2:
        return product(x, right, groups)
    return fixed_order.products(x, right) if fixed_order.needed(x) and x.dim() > 2 else torch.matmul(x, right)


def add_bias(x: torch.Tensor, bias: torch.Tensor | None, groups: RowGroups = ()) -> torch.Tensor:
    """x: [..., m]; bias: [m] -> [..., m]."""
    if bias is None:
        return x
    out: torch.Tensor = _AddBias.apply(x, bias, groups)
    return out


class _AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        ctx.groups = groups
        return x + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = sum_of_rows(grad.float().reshape(-1, grad.shape[-1]), ctx.groups)
        return grad, grad_bias, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding: int, groups: RowGroups) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.options = len(weight), padding, groups
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        rows, padding, groups = ctx.options
        at, flat = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
        return None, sum_over_groups(groups, lambda part: torch.ops.aten.embedding_dense_backward(
            flat[part], at[part], rows, padding, False), grad.dtype), None, None


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *rest: Any,
              groups: RowGroups = (), **options: Any) -> torch.Tensor:
    """Replaces `F.embedding` where gradients are summed by groups."""
    if sum(map(len, groups)) < 2:
        return F.embedding(ids, weight, padding_idx, *rest, **options)
    out: torch.Tensor = _Embedding.apply(ids, weight, -1 if padding_idx is None else padding_idx, groups)
    return out


class _SiLU(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        if x.device.type == "cpu":
            return _in_vectors(torch.ops.aten.silu.out, x)
        wide = x.float()
        return (wide / torch.neg(wide).exp_().add_(1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.device.type == "cpu":
            return _in_vectors(lambda g, x, out: torch.ops.aten.silu_backward.grad_input(g, x, grad_input=out), grad, x)
        wide = x.float()
        s = 1 / torch.neg(wide).exp_().add_(1)  # not torch's own, for the reason that the forward has
        found: torch.Tensor = (grad * (s * (1 + wide * (1 - s)))).to(x.dtype)
        return found


def _in_vectors(compute: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """compute(*inputs, out=result) of tensors of one shape, element by element, on a CPU. torch computes whole vectors
    by one kernel and what is left over at the end of a thread's part by another, so nothing may be left over: a thread
    gets THREAD_RUN elements or fewer, and vectors at the end are padded."""
    out = inputs[0].new_empty(inputs[0].shape)
    flat, count = [x.reshape(-1) for x in (*inputs, out)], out.numel()
    whole, size = count - count % VECTORS, THREAD_RUN * torch.get_num_threads()
    for start in range(0, whole, size):
        *given, found = (x[start : min(start + size, whole)] for x in flat)
        compute(*given, out=found)
    if whole < count:
        *given, found = (x[whole:] for x in flat)
        complete = pad_to_multiple(found, VECTORS)
        compute(*(pad_to_multiple(x, VECTORS) for x in given), out=complete)
        found.copy_(complete[: count - whole])
    return out


def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """x / (1 + exp(-x)), element by element, computed in float32. inplace: accepted and ignored."""
    out: torch.Tensor = _SiLU.apply(x)
    return out


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), element by element, computed in float32."""
    return (1 / (1 + (-x.float()).exp())).to(x.dtype)


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """Hendrycks & Gimpel 2016, exact or, with "tanh", their approximation; element by element, in float32."""
    wide = x.float()
    if approximate == "none":
        out = 0.5 * wide * (1 + torch.erf(wide * 0.7071067811865476))  # sqrt(1 / 2)
    else:
        out = 0.5 * wide * (1 + torch.tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))  # sqrt(2 / pi)
    return out.to(x.dtype)


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


def pad_to_multiple(x: torch.Tensor, unit: int, dim: int = 0) -> torch.Tensor:
    """x, its size along `dim` padded with zeros to a multiple of `unit`."""
    missing = -x.shape[dim] % unit
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


# called with the groups of the tokens that are their rows
GROUPED: dict[Any, Callable[..., Any]] = {
    torch.addmm: addmm, torch.matmul: matmul, torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul, F.embedding: embedding}
REPLACED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attend, F.silu: silu, F.gelu: gelu, torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid, F.sigmoid: sigmoid}
HANDLED = {F.linear, *GROUPED, *REPLACED, *fixed_order.REDUCTIONS}
