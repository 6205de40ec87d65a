"""Attention over packed sequences, registered with transformers as "rldsl".

A forward pass carries a `PackedAttention`, which knows where sequences begin and end in the packed row and what happens
to keys and values. `VarlenAttention` keeps nothing; those of `generate/kv_cache.py` write and read the KV cache;
`ContextParallelAttention` gathers from other ranks; `PaddedAttention` adds padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rldsl.backends.torch.kernels import cpu_attention
from rldsl.backends.torch.kernels.attention_kernels import has_varlen_kernel, varlen_attention
from rldsl.backends.torch.kernels.autograd import outside_modes
from rldsl.backends.torch.kernels.length_buckets import LengthBuckets
from rldsl.backends.torch.model.sequences import ROLE, AttentionRole, RowFunction, Sequences
from rldsl.diag import fail
from rldsl.runtime.store import offsets_within

NAME = "rldsl"


@dataclass(frozen=True, slots=True)
class Scores:
    """How the attention of a layer turns queries and keys into weights."""

    scale: float                       # of the products of queries and keys
    window: int | None = None          # how many tokens a query sees at most, itself included; None: all before it
    chunk: int | None = None           # tokens of a chunk, before which its queries see nothing; None: no chunks
    softcap: float | None = None       # c: a score s counts as c * tanh(s / c)
    sinks: torch.Tensor | None = None  # [H] a score for each head that takes weight and gives nothing
    compiled: bool = False             # kernels that the machine has compiled may compute it

    @property
    def plain_softmax(self) -> bool:
        """Whether weights are the softmax of scaled products, of which torch's attention is one kernel."""
        return self.softcap is None and self.sinks is None

    @property
    def plain(self) -> bool:
        """Whether a kernel for causal attention in a window computes it."""
        return self.plain_softmax and self.chunk is None

    def visible(self, at: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """[T, L] bool: which of the keys at positions `columns` [L] or [T, L] the queries at positions `at` [T, 1]
        see."""
        seen = columns <= at
        if self.window is not None:
            seen = seen & (columns > at - self.window)
        return seen if self.chunk is None else seen & (columns >= at // self.chunk * self.chunk)

    @property
    def masked(self) -> tuple[int | None, int | None]:
        """What `visible` depends on, as a key."""
        return self.window, self.chunk


class PackedAttention(Sequences, Protocol):
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """Causal attention of one layer. q: [H, T, D]; k: [K, T, D] and v: [K, T, E] with H a multiple of K. Returns
        [T, H, E]."""


def register() -> None:
    """Make `config._attn_implementation = "rldsl"` mean `attention`. The name has no entry among transformers' mask
    functions, so transformers makes no mask and does not ask the device whether sequences are packed."""
    AttentionInterface.register(NAME, attention)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None,
              sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
              **rest: Any) -> tuple[torch.Tensor, None]:
    """The signature that transformers calls. query: [1, H, T, D]; key: [1, K, T, D]; value: [1, K, T, E]. s_aux: [H]
    attention sinks. Returns [1, T, H, E]. Errors: RL0731 if the family makes its own mask."""
    role: AttentionRole = getattr(module, ROLE)
    packed_attention: PackedAttention | None = role.current.sequences
    if isinstance(attention_mask, torch.Tensor):
        raise fail("RL0731", "this model family's attention is not supported", place=type(module).__name__,
                   label="it makes its own mask, which says more than what is before a token",
                   help="docs/families.md lists the families that run")
    if packed_attention is None or query.shape[0] != 1:
        raise ValueError("attention needs one packed row and its PackedAttention")
    # under autocast, rotary embeddings and head norms leave q and k in float32 next to a bfloat16 v, and attention
    # multiplies in bfloat16 anyway: cast now, they are saved and cached at half the size
    query, key = query.to(value.dtype), key.to(value.dtype)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or _window(module, role),
                    _chunk(module), softcap or None, s_aux, role.compiled)
    out = packed_attention.attend(role.number(), query.squeeze(0), key.squeeze(0), value.squeeze(0), scores)
    return out.unsqueeze(0), None


def _kind(module: Any) -> str:
    """What its config calls the attention of a layer: "full_attention", "sliding_attention", "chunked_attention"."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return str(kinds[module.layer_idx]) if kinds else ""


def _window(module: Any, role: AttentionRole) -> int | None:
    """Of families that give it to their masks alone."""
    return int(module.config.sliding_window) if _kind(module) == "sliding_attention" else role.window


def _chunk(module: Any) -> int | None:
    return int(module.config.attention_chunk_size) if _kind(module) == "chunked_attention" else None


def uses_varlen_kernel(q: torch.Tensor, v: torch.Tensor, scores: Scores) -> bool:
    """Whether a kernel for packed sequences computes a layer's attention."""
    return has_varlen_kernel(q) and scores.plain and q.shape[-1] == v.shape[-1]


def uses_compiled_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> bool:
    """Whether `cpu_attention` computes a layer's attention."""
    return scores.compiled and scores.plain and cpu_attention.takes(q, k, v)


class VarlenAttention:
    """Causal attention inside each of S packed sequences."""

    complete = True
    blocks: torch.Tensor | None = None  # [T]: tokens of a block, from 0, see one another; -1: of none. None: no blocks

    def __init__(self, lengths: torch.Tensor, on_host: Sequence[int] | None = None):
        """lengths: [S] int64, on the device of the model. on_host: the same, if the host knows them; else it waits for
        the device."""
        self.lengths, self._on_host = lengths, on_host
        longest = max(on_host, default=0) if on_host is not None else int(lengths.max()) if lengths.numel() else 0
        self.max_seqlen = longest
        self.positions = offsets_within(lengths, None if on_host is None else sum(on_host))
        # Made when a layer asks, since kernels for packed sequences need none
        self._buckets: LengthBuckets | None = None
        self._segments: cpu_attention.Segments | None = None

    @property
    def buckets(self) -> LengthBuckets:
        if self._buckets is None:
            with outside_modes():  # an invariant model asks for them in its own
                self._buckets = LengthBuckets(self.lengths, self._on_host)
        return self._buckets

    @property
    def segments(self) -> cpu_attention.Segments:
        if self._segments is None:
            self._segments = cpu_attention.Segments.of_lengths(
                self.lengths.tolist() if self._on_host is None else self._on_host)
        return self._segments

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        if uses_compiled_kernel(q, k, v, scores) and self.blocks is None:
            return cpu_attention.attend(q, k, v, self.segments, scores.scale, scores.window)
        if uses_varlen_kernel(q, v, scores) and self.blocks is None:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            cu_seqlens = F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
            return varlen_attention(q, k, v, (cu_seqlens, cu_seqlens), (self.max_seqlen, self.max_seqlen), scores.scale,
                                    scores.window)
        padded = zip(*(self.buckets.pad(x.transpose(0, 1)) for x in (q, k, v)), self._padded_blocks(), strict=True)
        return self.buckets.unpad([
            _bucket_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scores, blocks)
            for q, k, v, blocks in padded])

    def _padded_blocks(self) -> Sequence[torch.Tensor | None]:
        """[sequences, tokens] of each bucket; padding is of no block."""
        buckets = self.buckets
        if self.blocks is None:
            return [None] * len(buckets.shapes)
        cells = self.blocks[buckets.token_of_cell].index_fill(0, buckets.padding_cells, -1)
        return buckets.split_cells(cells)

    def by_rows(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.by_rows`."""
        padded = zip(*map(self.buckets.pad, inputs), strict=True)
        return tuple(map(self.buckets.unpad, zip(*(run(rows, None) for rows in padded), strict=True)))

    def recur(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.recur`: all sequences begin here, and nothing is kept of them."""
        return self.by_rows(place, run, inputs)


def _bucket_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores,
                      blocks: torch.Tensor | None = None) -> torch.Tensor:
    """q: [S, H, T, D], of sequences that are padded to T tokens; k: [S, K, T, D]; v: [S, K, T, E]. blocks: [S, T], as
    of `VarlenAttention`. Returns [S, T, H, E]."""
    length, mask = q.shape[2], None
    if not scores.plain or min(scores.window or length, length) < length or blocks is not None:
        at = torch.arange(length, device=q.device)
        mask = scores.visible(at[:, None], at)
    if mask is not None and blocks is not None:
        near = at > at[:, None] - (scores.window or length)  # later tokens of a block are near
        mask = mask | ((blocks[:, None, :, None] == blocks[:, None, None]) & (blocks[:, None, :, None] >= 0) & near)
    return masked_attention(q, k, v, mask, scores).transpose(1, 2)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scores: Scores
                     ) -> torch.Tensor:
    """Attention with a mask of any form. q: [S, H, T, D]; k: [S, K, L, D]; v: [S, K, L, E]; H a multiple of K. mask:
    [T, L] or [S, 1, T, L], True or 0 where a key is visible; None: causal, with L = T. Returns [S, H, T, E]."""
    if scores.plain_softmax:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scores.scale,
                                              enable_gqa=True)
    if mask is None:
        raise ValueError("attention with capped scores or sinks needs a mask")
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    weights = (q @ k.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min) if mask.dtype == torch.bool else weights + mask
    if scores.sinks is None:
        return weights.softmax(-1).to(v.dtype) @ v
    sinks = scores.sinks.to(weights.dtype).view(1, -1, 1, 1).expand(*weights.shape[:3], 1)
    return torch.cat([weights, sinks], -1).softmax(-1)[..., :-1].to(v.dtype) @ v


def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scores: Scores
                     ) -> torch.Tensor:
    """Attention of one query per sequence. q: [H, S, D]; k: [S, K, L, D]; v: [S, K, L, E]; H a multiple of K. mask:
    [S, 1, 1, L], True or 0 where a key is visible. Returns [S, H, E].

    The query heads that share a KV head take the place of the query positions of a longer sequence, so that keys and
    values need not be repeated."""
    q = q.transpose(0, 1)
    if not scores.plain_softmax:
        return masked_attention(q[:, :, None], k, v, mask, scores)[:, :, 0]
    q = q.unflatten(1, (k.shape[1], -1))  # [S, K, H / K, D]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale).flatten(1, 2)


def decode_by_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
                       ) -> torch.Tensor:
    """`decode_attention` by products of batches, which a CPU computes faster than its fused kernel if the tokens of a
    head are contiguous. mask: [S * K, 1, L], 0 or -inf."""
    queries = q.transpose(0, 1).unflatten(1, (k.shape[1], -1)).flatten(0, 1)  # [S * K, H / K, D]
    weights = torch.baddbmm(mask, queries, k.flatten(0, 1).transpose(1, 2), alpha=scale).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).view(*q.shape[1::-1], v.shape[3])
