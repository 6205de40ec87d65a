"""Attention over packed sequences, registered with transformers as "rldsl".

A forward pass gets a *packing*: it says where sequences begin and end in the packed row, and what to do with keys and
values. `Varlen` keeps nothing; those of `backends/torch/generate/kv_cache.py` write and read a slab of keys and values;
`Context` asks other ranks. """

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from rldsl.backends.torch.kernels.length_buckets import Grids
from rldsl.backends.torch.kernels.optional_packages import flash
from rldsl.backends.torch.kernels.varlen_attention import fits, varlen
from transformers import AttentionInterface

from rldsl.diag import fail
from rldsl.runtime.store import within

NAME = "rldsl"


class Packing(Protocol):
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """q: [H, T, D]; k, v: [K, T, D] with H a multiple of K. Returns [T, H, D]."""


def register() -> None:
    """Make `config._attn_implementation = "rldsl"` mean `attention`. It has no entry among the makers of masks, so
    transformers makes none, and does not ask the device whether sequences are packed."""
    AttentionInterface.register(NAME, attention)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, packing: Packing | None = None,
              sliding_window: int | None = None, softcap: float | None = None, **rest: Any
              ) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    if softcap is not None or rest.get("s_aux") is not None:
        raise fail("RL0731", "this model family's attention is not supported",
                   place=type(module).__name__, help="soft-capped logits and attention sinks are not there yet")
    assert packing is not None and query.shape[0] == 1
    # under autocast, rotary embeddings and norms of heads leave q and k in float32 beside a half v, and attention
    # multiplies halves anyway: cast now, they are kept and cached at half the size
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = packing.attend(module.layer_idx, query.squeeze(0), key.squeeze(0), value.squeeze(0), scale,
                         sliding_window)
    return out.unsqueeze(0), None


class Varlen:
    """Causal attention inside each of S packed sequences. lengths: [S] int64 on the device of the model."""

    def __init__(self, lengths: torch.Tensor):
        self.lengths = lengths
        self.longest = int(lengths.max()) if lengths.numel() else 0
        self.positions = within(lengths)
        self.grids = Grids(lengths)  # before any pass, which waits for nothing

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        if fits(q, window):
            return self._fused(q, k, v, scale, window)
        spread = zip(*(self.grids.spread(x.transpose(0, 1)) for x in (q, k, v)))
        return self.grids.join([self._grid(*(x.transpose(1, 2) for x in qkv), scale, window) for qkv in spread])

    def _grid(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
              ) -> torch.Tensor:
        """q: [S, H, T, D] of sequences that are filled up to T tokens; k, v: [S, K, T, D]. Returns [S, T, H, D]."""
        longest, mask = q.shape[2], None
        if window is not None and window < longest:
            at = torch.arange(longest, device=q.device)
            gap = at[:, None] - at[None, :]
            mask = (gap >= 0) & (gap < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                                              enable_gqa=True).transpose(1, 2)

    def _fused(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
               ) -> torch.Tensor:
        edges = F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        if flash().usable:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return varlen(q, k, v, (edges, edges), (self.longest, self.longest), scale, window)
        from torch.nn.attention.varlen import varlen_attn

        repeat = q.shape[0] // k.shape[0]
        k, v = (x.repeat_interleave(repeat, 0) if repeat > 1 else x for x in (k, v))
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        return varlen_attn(q, k, v, edges, edges, self.longest, self.longest, scale=scale, window_size=(-1, 0))
