"""The KV cache of a generate call, and the attention that writes and reads it.

In: queries, keys and values of a forward pass. Out: the attention output; keys and values are in the cache.
`PrefillAttention` writes whole prompts, one prompt perhaps into several slots; `DecodeAttention` appends one token to
each slot of a run and reads the cache in place. The tokens of a slot are contiguous, with heads inside a token:
[slots, width, K, D], the layout of flash-attn's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from rldsl.backends.torch.kernels.attention_kernels import decode_kernel
from rldsl.backends.torch.model.attention import VarlenAttention
from rldsl.runtime.store import offsets_within

HostLayers = dict[int, tuple[torch.Tensor, torch.Tensor]]  # layer -> keys and values [T, K, D] in host memory


@dataclass
class KVCache:
    """Memory for `num_slots` sequences of at most `width` tokens."""

    num_slots: int  # sequences that it can hold
    width: int  # tokens per slot
    device: torch.device  # on which it is
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # [slots, width, K, D] each
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)                # see `mask_values`
    slot_offsets: torch.Tensor = field(init=False)  # [slots] the index of a slot's first token among all slots * width
    columns: torch.Tensor = field(init=False)       # [width] 0, 1, ...

    def __post_init__(self) -> None:
        self.slot_offsets = torch.arange(self.num_slots, device=self.device) * self.width
        self.columns = torch.arange(self.width, device=self.device)

    def layer(self, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, allocated at first use. k, v: any [K, T, D] of this layer."""
        if index not in self.layers:  # zeros: masked scores are multiplied by values too, which must be finite
            keys, values = (x.new_zeros(self.num_slots, self.width, x.shape[0], x.shape[2]) for x in (k, v))
            self.layers[index] = (keys, values)
        return self.layers[index]

    def mask_values(self, dtype: torch.dtype) -> torch.Tensor:
        """[2]: what a mask adds to the score of a visible and of a hidden token. Made once, so that a captured decode
        step refers to a tensor that stays."""
        if dtype not in self.masks:
            self.masks[dtype] = torch.tensor([0.0, -torch.inf], dtype=dtype, device=self.device)
        return self.masks[dtype]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, token_indices: torch.Tensor,
              source: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Write token source[i] of k and v (token i without `source`) to token_indices[i] among all slots * width.
        k, v: [K, T, D]; token_indices, source: [n] int64. Returns the layer's keys and values."""
        cached = self.layer(layer, k, v)
        for cache, x in zip(cached, (k, v), strict=True):
            tokens = x.transpose(0, 1)
            cache.flatten(0, 1).index_copy_(0, token_indices, tokens if source is None else tokens[source])
        return cached

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of some slots to others, all at once."""
        for cached in self.layers.values():
            for cache in cached:
                cache[list(targets), :length] = cache[list(sources), :length]

    def offload(self, slot: int, length: int) -> HostLayers:
        """Copy the first `length` tokens of a slot to host memory."""
        return {i: (k[slot, :length].to("cpu", copy=True), v[slot, :length].to("cpu", copy=True))
                for i, (k, v) in self.layers.items()} if length else {}

    def onload(self, slot: int, length: int, layers: HostLayers) -> None:
        """Copy back what `offload` returned, perhaps to another slot."""
        for i, pair in layers.items():
            for cache, x in zip(self.layers[i], pair, strict=True):
                cache[slot, :length] = x.to(self.device)


class PrefillAttention(VarlenAttention):
    """Causal attention in each of U packed prompts, whose keys and values go to the cache."""

    def __init__(self, cache: KVCache, lengths: torch.Tensor, slots: torch.Tensor, prompt: torch.Tensor):
        """lengths: [U] of the prompts. slots[i] gets the prompt numbered prompt[i]; both [n], n >= U."""
        super().__init__(lengths)
        copied = lengths[prompt]
        column = offsets_within(copied)
        self.cache, self.token_indices = cache, cache.slot_offsets[slots].repeat_interleave(copied) + column
        starts = lengths.cumsum(0) - lengths
        repeats = len(prompt) > len(lengths)
        self.source = starts[prompt].repeat_interleave(copied) + column if repeats else None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        self.cache.write(layer, k, v, self.token_indices, self.source)
        return super().attend(layer, q, k, v, scale, window)


class DecodeAttention:
    """Attention of one new token for each of the S slots from `first` on."""

    def __init__(self, cache: KVCache, first: int, positions: torch.Tensor, kv_len: int):
        """positions: [S] of the new tokens in their sequences. kv_len: how many tokens of a slot are read, at least the
        largest position plus 1."""
        self.cache, self.slots = cache, slice(first, first + len(positions))
        self.positions, self.kv_len = positions, kv_len
        self.token_indices = cache.slot_offsets[self.slots] + positions
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}  # one for all layers with the same window

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """See `PackedAttention.attend`. The query heads that share a KV head take the place of the query positions of a
        longer sequence, so that keys and values need not be repeated."""
        cached = self.cache.write(layer, k, v, self.token_indices)
        if (kernel := decode_kernel(q)) is not None:
            return kernel(q.transpose(0, 1), *cached, self.slots.start, self.positions, self.kv_len, scale, window)
        keys, values = (x[self.slots, : self.kv_len].transpose(1, 2) for x in cached)
        q = q.transpose(0, 1).unflatten(1, (k.shape[0], -1))  # [S, K, H / K, D]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask(window, q.dtype), scale=scale)
        return out.flatten(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[S, 1, 1, kv_len], 0 or -inf."""
        if (window, dtype) not in self._masks:
            at, columns = self.positions[:, None], self.cache.columns[: self.kv_len]
            visible = columns <= at if window is None else (columns <= at) & (columns > at - window)
            zero, minus_inf = self.cache.mask_values(dtype)
            self._masks[window, dtype] = torch.where(visible, zero, minus_inf)[:, None, None]
        return self._masks[window, dtype]
