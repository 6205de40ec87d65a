"""Which kernel reads a slab in place while tokens are decoded, on CUDA and in half precision.

In: queries. Out: flash-attn's where it is installed in a version that will do, else our own in Triton where that is,
else none: torch's own attention, which knows no lengths, then reads under a mask. Neither has run on a GPU yet; ours is
tested in Triton's interpreter (`tests/generation/test_split_kv.py`). """

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from rldsl.backends.torch.kernels.optional_packages import flash

# (q [S, H, D], keys and values [slots, W, K, D], first slot, positions [S], width, scale, window) -> [S, H, D]
Reader = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, int, float, int | None], torch.Tensor]


def reader(q: torch.Tensor) -> Reader | None:
    return _installed() if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) else None


@cache
def _installed() -> Reader | None:
    if flash().usable:
        return _flash
    if find_spec("triton") is not None:
        from rldsl.backends.torch.kernels.split_kv import attend

        return attend
    return None


def _flash(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, positions: torch.Tensor, width: int,
           scale: float, window: int | None) -> torch.Tensor:
    from flash_attn import flash_attn_with_kvcache

    rows = slice(first, first + len(positions))
    left = -1 if window is None else window - 1
    return flash_attn_with_kvcache(
        q[:, None], keys[rows, :width], values[rows, :width], cache_seqlens=(positions + 1).to(torch.int32),
        softmax_scale=scale, causal=True, window_size=(left, 0 if left >= 0 else -1))[:, 0]
