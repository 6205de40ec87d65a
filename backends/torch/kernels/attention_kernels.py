"""Fused attention kernels on CUDA in half precision: which one can be used, for packed sequences and for decoding.

In: queries, keys and values. Out: whether there is a kernel, and its result.

Packed sequences: flash-attn where it is installed in a fitting version, else torch's `varlen_attn`, which
`model/attention.py` and `model/context_parallel.py` call themselves. Decoding: flash-attn, else our Triton kernel
(`split_kv.py`), else none: torch's own attention, which knows no lengths, then reads the KV cache under a mask.

None of these has run on a GPU in the tests: a stand-in with flash-attn's signature takes its place, and our kernel runs
in Triton's interpreter (`tests/generation/test_split_kv.py`).

Source: FlashAttention-2, Dao 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from rldsl.backends.torch.kernels.optional_packages import flash_attn

MAX_HEAD_DIM = 256  # of the packed-sequence kernels
HALF_DTYPES = (torch.float16, torch.bfloat16)

# (q [S, H, D], keys and values [slots, W, K, D], first slot, positions [S], kv_len, scale, window) -> [S, H, D]
DecodeKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, int, float, int | None], torch.Tensor]


def has_varlen_kernel(q: torch.Tensor, window: int | None) -> bool:
    """Whether a kernel for packed sequences takes these queries [..., D]. With a sliding window only flash-attn's does,
    not torch's."""
    half = q.is_cuda and q.dtype in HALF_DTYPES and q.shape[-1] <= MAX_HEAD_DIM
    return half and (window is None or flash_attn().usable)


def flash_varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                           cu_seqlens: tuple[torch.Tensor, torch.Tensor], max_seqlen: tuple[int, int], scale: float,
                           window: int | None) -> torch.Tensor:
    """flash-attn over packed sequences: causal, with the last query of a sequence aligned to its last key.

    q: [T, H, D]; k, v: [R, K, D] with H a multiple of K.
    cu_seqlens: [S + 1] int32 offsets of the sequences' queries and of their keys; max_seqlen: the longest of both.
    window: how many keys a query sees at most, itself included (None: all before it).
    Returns [T, H, D]."""
    from flash_attn import flash_attn_varlen_func

    out: torch.Tensor = flash_attn_varlen_func(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1],
        max_seqlen_q=max_seqlen[0], max_seqlen_k=max_seqlen[1], softmax_scale=scale, causal=True,
        window_size=_window_size(window))
    return out


def decode_kernel(q: torch.Tensor) -> DecodeKernel | None:
    """The kernel that reads the KV cache in place for these queries; None: there is none."""
    return _installed_decode_kernel() if q.is_cuda and q.dtype in HALF_DTYPES else None


@cache
def _installed_decode_kernel() -> DecodeKernel | None:
    if flash_attn().usable:
        return _flash_decode
    if find_spec("triton") is not None:
        from rldsl.backends.torch.kernels.split_kv import split_kv_attention

        return split_kv_attention
    return None


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
