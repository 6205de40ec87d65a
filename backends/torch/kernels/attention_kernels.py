"""Fused attention kernels on CUDA in half precision: which one can be used, for packed sequences and for decoding.

In: queries, keys and values. Out: whether there is a kernel, and its result.

Packed sequences: flash-attn where it is installed in a fitting version, else torch's `varlen_attn`. Decoding:
flash-attn, else our Triton kernel (`split_kv.py`) if it compiles and is right on this machine, else none: torch's own
attention, which knows no lengths, then reads the KV cache under a mask.

None of these has run on a GPU in the tests: a stand-in with flash-attn's signature takes its place, and our kernel runs
in Triton's interpreter (`tests/generation/test_split_kv.py`).

Source: FlashAttention-2, Dao 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels.optional_packages import flash_attn
from rldsl.memory.attention import fused_kernels_take

MIN_CAPABILITY = (8, 0)  # of the GPU, for kernels of packed sequences: Ampere
HALF_DTYPES = (torch.float16, torch.bfloat16)

# (q [S, H, D], keys and values [slots, W, K, D], first slot, positions [S], kv_len, scale, window) -> [S, H, D]
DecodeKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, int, float, int | None], torch.Tensor]


def has_varlen_kernel(q: torch.Tensor) -> bool:
    """Whether a kernel for packed sequences takes these queries [..., D]."""
    fits = q.is_cuda and q.dtype in HALF_DTYPES and fused_kernels_take(q.shape[-1])
    return fits and torch.cuda.get_device_capability(q.device) >= MIN_CAPABILITY


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: tuple[torch.Tensor, torch.Tensor],
                     max_seqlen: tuple[int, int], scale: float, window: int | None) -> torch.Tensor:
    """Attention over packed sequences: causal, with the last query of a sequence aligned to its last key.

    q: [T, H, D]; k, v: [R, K, D] with H a multiple of K.
    cu_seqlens: [S + 1] int32 offsets of the sequences' queries and of their keys; max_seqlen: the longest of both.
    window: how many keys a query sees at most, itself included (None: all before it).
    Returns [T, H, D]."""
    compute = _flash_varlen if flash_attn().usable else _torch_varlen
    return compute(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens, max_seqlen, scale, window)


def _flash_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: tuple[torch.Tensor, torch.Tensor],
                  max_seqlen: tuple[int, int], scale: float, window: int | None) -> torch.Tensor:
    from flash_attn import flash_attn_varlen_func

    out: torch.Tensor = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1], max_seqlen_q=max_seqlen[0],
        max_seqlen_k=max_seqlen[1], softmax_scale=scale, causal=True, window_size=_window_size(window),
        deterministic=torch.are_deterministic_algorithms_enabled())
    return out


def _torch_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: tuple[torch.Tensor, torch.Tensor],
                  max_seqlen: tuple[int, int], scale: float, window: int | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and "enable_gqa" in signature(varlen_attn).parameters:  # since torch 2.12
        groups["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = varlen_attn(q, k, v, *cu_seqlens, *max_seqlen, scale=scale,
                      window_size=(-1 if window is None else window - 1, 0), **groups)
    return out if isinstance(out, torch.Tensor) else out[0]


def prepare_decode_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """Choose the kernel of decoding, which may try it: before the first step, since the trial reads its result."""
    if device.type == "cuda" and dtype in HALF_DTYPES:
        _installed_decode_kernel(device)


def decode_kernel(q: torch.Tensor) -> DecodeKernel | None:
    """The kernel that reads the KV cache in place for these queries; None: there is none."""
    return _installed_decode_kernel(q.device) if q.is_cuda and q.dtype in HALF_DTYPES else None


@cache
def _installed_decode_kernel(device: torch.device) -> DecodeKernel | None:
    if flash_attn().usable:
        return _flash_decode
    if find_spec("triton") is None:
        return None
    problem = _triton_problem(device)
    if problem:
        warnings.warn(f"decoding uses torch's attention, since Triton cannot be used here: {problem}", stacklevel=2)
        return None
    from rldsl.backends.torch.kernels.split_kv import split_kv_attention

    return split_kv_attention


def _triton_problem(device: torch.device) -> str:
    """Why the Triton kernel cannot be used on this machine, "" if it can: it needs a C compiler and Python headers when
    it is first launched; its result is compared with torch's attention."""
    try:
        from rldsl.backends.torch.kernels.split_kv import split_kv_attention

        q, keys, values = (torch.linspace(-1, 1, count, device=device).sin().to(torch.bfloat16).view(shape)
                           for count, shape in ((256, (1, 4, 64)), (12800, (1, 100, 2, 64)), (12800, (1, 100, 2, 64))))
        found = split_kv_attention(q, keys, values, 0, torch.tensor([69], device=device), 100, 0.125, None)
        k, v = (x[:, :70].transpose(1, 2) for x in (keys, values))
        expected = F.scaled_dot_product_attention(q[:, :, None], k, v, scale=0.125, enable_gqa=True)[:, :, 0]
        gap = float((found.float() - expected.float()).abs().max())
    except Exception as error:  # whatever a compiler raises
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return "" if gap < 0.05 else f"its result differs from torch's attention by {gap:.3g}"


def _flash_decode(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, positions: torch.Tensor,
                  kv_len: int, scale: float, window: int | None) -> torch.Tensor:
    from flash_attn import flash_attn_with_kvcache

    slots = slice(first, first + len(positions))
    out: torch.Tensor = flash_attn_with_kvcache(
        q[:, None], keys[slots, :kv_len], values[slots, :kv_len], cache_seqlens=(positions + 1).to(torch.int32),
        softmax_scale=scale, causal=True, window_size=_window_size(window))[:, 0]
    return out


def _window_size(window: int | None) -> tuple[int, int]:
    """flash-attn counts the keys to the left and to the right of a query; -1: no limit."""
    left = -1 if window is None else window - 1
    return left, 0 if left >= 0 else -1
