"""Attention over packed sequences by one kernel, on CUDA and in half precision.

In: queries, keys and values of sequences that lie one after the other, and where each begins. Out: whether there is
such a kernel, and flash-attn's result (Dao 2023, arXiv:2307.08691); torch's is called where the shapes are made.
flash-attn has not run on a GPU here yet: tests put a stand-in with its signature in its place.
"""

from __future__ import annotations

import torch
from rldsl.backends.torch.kernels.optional_packages import flash

WIDEST = 256  # units of a head that these kernels know


def fits(q: torch.Tensor, window: int | None) -> bool:
    """Whether there is such a kernel. With a sliding window torch's is not taken, flash-attn's is."""
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= WIDEST
    return half and (window is None or flash().usable)


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: tuple[torch.Tensor, torch.Tensor],
           longest: tuple[int, int], scale: float, window: int | None) -> torch.Tensor:
    """q: [T, H, D]; k, v: [R, K, D] with H a multiple of K. edges: [S + 1] int32 of queries and of keys; longest: of
    both. The last query of a sequence sees its last key, and `window` keys in all; None: all before. Returns
    [T, H, D]."""
    from flash_attn import flash_attn_varlen_func

    left = -1 if window is None else window - 1
    return flash_attn_varlen_func(
        q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens_q=edges[0], cu_seqlens_k=edges[1],
        max_seqlen_q=longest[0], max_seqlen_k=longest[1], softmax_scale=scale, causal=True,
        window_size=(left, 0 if left >= 0 else -1))
