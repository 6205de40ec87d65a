"""Attention over packed sequences, registered with transformers as "rldsl".

A forward pass carries a `PackedAttention`, which knows where sequences begin and end in the packed row and what happens
to keys and values. `VarlenAttention` keeps nothing; those of `generate/kv_cache.py` write and read the KV cache;
`ContextParallelAttention` gathers from other ranks; `PaddedAttention` adds padding.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rldsl.backends.torch.kernels.attention_kernels import has_varlen_kernel, varlen_attention
from rldsl.backends.torch.kernels.length_buckets import LengthBuckets
from rldsl.diag import fail
from rldsl.runtime.store import offsets_within

NAME = "rldsl"


class PackedAttention(Protocol):
    positions: torch.Tensor  # [T] int64, of the row's tokens in their sequences

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """Causal attention of one layer. q: [H, T, D]; k, v: [K, T, D] with H a multiple of K. scale: of the scores.
        window: how many tokens a query sees at most, itself included (None: all before it). Returns [T, H, D]."""


def register() -> None:
    """Make `config._attn_implementation = "rldsl"` mean `attention`. The name has no entry among transformers' mask
    functions, so transformers makes no mask and does not ask the device whether sequences are packed."""
    AttentionInterface.register(NAME, attention)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None,
              packed_attention: PackedAttention | None = None, sliding_window: int | None = None,
              softcap: float | None = None, **rest: Any) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls. query: [1, H, T, D]; key, value: [1, K, T, D]. Returns [1, T, H, D].
    Errors: RL0731 for soft-capped logits and attention sinks."""
    if softcap is not None or rest.get("s_aux") is not None:
        raise fail("RL0731", "this model family's attention is not supported",
                   place=type(module).__name__, help="soft-capped logits and attention sinks are not supported yet")
    if packed_attention is None or query.shape[0] != 1:
        raise ValueError("attention needs one packed row and its PackedAttention")
    # under autocast, rotary embeddings and head norms leave q and k in float32 next to a bfloat16 v, and attention
    # multiplies in bfloat16 anyway: cast now, they are saved and cached at half the size
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    out = packed_attention.attend(layer, query.squeeze(0), key.squeeze(0), value.squeeze(0), scale, sliding_window)
    return out.unsqueeze(0), None


class VarlenAttention:
    """Causal attention inside each of S packed sequences."""

    def __init__(self, lengths: torch.Tensor):
        """lengths: [S] int64, on the device of the model."""
        self.lengths = lengths
        self.max_seqlen = int(lengths.max()) if lengths.numel() else 0
        self.positions = offsets_within(lengths)
        # On the CPU before the passes, since torch's attention needs them. On a GPU attention is fused, save in float32
        self._buckets = None if lengths.is_cuda else LengthBuckets(lengths)

    @property
    def buckets(self) -> LengthBuckets:
        if self._buckets is None:
            self._buckets = LengthBuckets(self.lengths)
        return self._buckets

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        if has_varlen_kernel(q):
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            cu_seqlens = F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
            return varlen_attention(q, k, v, (cu_seqlens, cu_seqlens), (self.max_seqlen, self.max_seqlen), scale,
                                    window)
        padded = zip(*(self.buckets.pad(x.transpose(0, 1)) for x in (q, k, v)), strict=True)
        return self.buckets.unpad([_bucket_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale,
                                                     window) for q, k, v in padded])


def _bucket_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
                      ) -> torch.Tensor:
    """q: [S, H, T, D], of sequences that are padded to T tokens; k, v: [S, K, T, D]. Returns [S, T, H, D]."""
    length, mask = q.shape[2], None
    if window is not None and window < length:
        at = torch.arange(length, device=q.device)
        gap = at[:, None] - at[None, :]
        mask = (gap >= 0) & (gap < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
                                          enable_gqa=True).transpose(1, 2)
