"""The Triton kernel in Triton's interpreter, against torch's attention, in a process of its own: what Triton defines is
interpreted or compiled from the moment that it is imported.

    TRITON_INTERPRET=1 python -m tests.generation.split_kv_check      # one line of JSON
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

from rldsl.backends.torch.generate import kv_cache
from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.kv_cache import DecodeAttention, KVCache
from rldsl.backends.torch.kernels import split_kv
from rldsl.backends.torch.model.attention import Scores

# slots, heads, heads of keys, head size, width, window, dtype; the interpreter multiplies no bfloat16
CASES = (
    (3, 4, 2, 16, 130, None, "float32"), (1, 4, 4, 64, 200, None, "float32"),
    (2, 6, 2, 24, 70, 20, "float32"),  # a window, a head size that is no power of two
    (2, 8, 1, 32, 300, None, "float32"), (2, 4, 2, 32, 100, None, "float16"), (1, 2, 1, 16, 1, None, "float32"))
PARTS = ((1, 1, 64), (1, 2, 4096), (256, 8, 4096), (64, 2, 1000), (1, 1, 1))  # sequences, heads of keys, width


def right(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, positions: torch.Tensor, width: int,
          scale: float, window: int | None) -> torch.Tensor:
    count, heads = q.shape[:2]
    k, v = (x[first : first + count, :width].transpose(1, 2).repeat_interleave(heads // x.shape[2], 1).double()
            for x in (keys, values))
    at = torch.arange(width)
    seen = (at <= positions[:, None]) & (at > positions[:, None] - (window or 10**6))
    return F.scaled_dot_product_attention(q[:, :, None].double(), k, v, attn_mask=seen[:, None, None],
                                          scale=scale)[:, :, 0]


def gap(slots: int, heads: int, groups: int, size: int, width: int, window: int | None, kind: str) -> float:
    """The largest difference; places that must not be read hold what would show."""
    g, dtype = torch.Generator().manual_seed(slots + width), getattr(torch, kind)
    keys, values = torch.randn(2, slots + 3, width + 5, groups, size, generator=g).to(dtype)
    values[:, width:] = 1e4
    q = torch.randn(slots, heads, size, generator=g).to(dtype)
    positions = torch.arange(slots) * 31 % width
    positions[0] = width - 1
    asked = (q, keys, values, 2, positions, width, 0.3, window)
    return float((split_kv.split_kv_attention(*asked).double() - right(*asked)).abs().max())


def decoded() -> float:
    """The largest difference of a step through the KV cache with this kernel and with torch's."""
    q, k, v = torch.randn(4, 3, 8), *torch.randn(2, 2, 3, 8)
    found = []
    for read in (split_kv.split_kv_attention, None):
        torch.manual_seed(1)
        held = KVCache(5, 20, torch.device("cpu"))
        for x in held.layer(0, k, v):
            x.copy_(torch.randn(x.shape))
        kv_cache.decode_kernel = lambda _, read=read: read
        attention = DecodeAttention(held, 1, torch.tensor([4, 0, 11]), DynamicSize(12))
        found.append(attention.attend(0, q, k, v, Scores(0.4)))
    return float((found[0] - found[1]).abs().max())


if __name__ == "__main__":
    print(json.dumps(dict(gaps=[gap(*case) for case in CASES], parts=[split_kv.parts(*p) for p in PARTS],
                          decoded=decoded(), block=split_kv.BLOCK)))
