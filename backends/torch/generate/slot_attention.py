"""Attention of new tokens at the end of what some slots of the KV cache hold, one slot after another.

In: queries, keys and values of a forward pass over the new tokens of some slots, in the order of the slots. Out: the
attention output; the keys and values are in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.runtime.store import offsets_within


class SlotAttention:
    """One or more new tokens for each of some slots, which need not be neighbors."""

    def __init__(self, cache: KVCache, slots: Sequence[int], cached: Sequence[int], counts: Sequence[int]):
        """cached: tokens that each of `slots` has. counts: new tokens of each."""
        device = cache.device
        self.cache, self.slots, self.cached, self.counts = cache, slots, cached, counts
        sizes = torch.tensor(counts, device=device)
        self.positions = torch.tensor(cached, device=device).repeat_interleave(sizes) + offsets_within(sizes)
        at = cache.slot_offsets[torch.tensor(slots, device=device)]
        self.token_indices = at.repeat_interleave(sizes) + self.positions
        self.at = torch.tensor(slots, device=device)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}  # one for all layers with the same window

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        keys, values = self.cache.write(layer, k, v, self.token_indices)
        if max(self.counts) == 1:
            return self._decode(q, keys, values, scale, window)
        parts: list[torch.Tensor] = []
        first = 0
        for i, (slot, cached, count) in enumerate(zip(self.slots, self.cached, self.counts, strict=True)):
            own_keys, own_values = (x[slot : slot + 1, : cached + count].transpose(1, 2) for x in (keys, values))
            own = q[None, :, first : first + count]
            parts.append(F.scaled_dot_product_attention(
                own, own_keys, own_values, attn_mask=self._mask(i, window), scale=scale, enable_gqa=True)[0])
            first += count
        return torch.cat(parts, 1).transpose(0, 1)

    def _mask(self, i: int, window: int | None) -> torch.Tensor:
        """[1, 1, T, L] bool: what the new tokens of a slot see."""
        if (i, window) not in self._masks:
            end = self.cached[i] + self.counts[i]
            at = torch.arange(self.cached[i], end, device=self.cache.device)[:, None]
            columns = self.cache.columns[:end]
            visible = columns <= at if window is None else (columns <= at) & (columns > at - window)
            self._masks[i, window] = visible[None, None]
        return self._masks[i, window]

    def _decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float,
                window: int | None) -> torch.Tensor:
        """One token for each slot. The query heads that share a KV head take the place of query positions, as in
        `DecodeAttention`; the slots need not be neighbors, so what they hold is copied."""
        kv_len = max(self.cached) + 1
        own_keys, own_values = (x[self.at, :kv_len].transpose(1, 2) for x in (keys, values))
        query = q.transpose(0, 1).unflatten(1, (keys.shape[2], -1))  # [S, K, H / K, D]
        if (-1, window) not in self._masks:
            at, columns = self.positions[:, None], self.cache.columns[:kv_len]
            visible = columns <= at if window is None else (columns <= at) & (columns > at - window)
            self._masks[-1, window] = visible[:, None, None]
        out = F.scaled_dot_product_attention(query, own_keys, own_values, attn_mask=self._masks[-1, window],
                                             scale=scale)
        return out.flatten(1, 2)
