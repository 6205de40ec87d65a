"""Attention of new tokens at the end of what some slots of the KV cache hold, one slot after another.

In: queries, keys and values of a forward pass over the new tokens of some slots, in the order of the slots. Out: the
attention output; the keys and values are in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.backends.torch.generate.sequence_states import SequenceState
from rldsl.backends.torch.model.attention import Scores, decode_attention, masked_attention
from rldsl.backends.torch.model.sequences import RowFunction
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.store import offsets_within


class SlotAttention:
    """One or more new tokens for each of some slots, which need not be neighbors."""

    complete = False
    blocks: torch.Tensor | None = None  # [T]: as of a `VarlenAttention`

    def __init__(self, cache: KVCache, slots: Sequence[int], cached: Sequence[int], counts: Sequence[int]):
        """cached: tokens that each of `slots` has. counts: new tokens of each."""
        device = cache.device
        self.cache, self.slots, self.cached, self.counts = cache, slots, cached, counts
        self.at, first, sizes = on_device([*slots, *cached, *counts], device).view(3, -1).unbind()
        total = sum(counts)
        self.offsets = offsets_within(sizes, total)
        self.positions = first.repeat_interleave(sizes, output_size=total) + self.offsets
        self.places = cache.places(self.at.repeat_interleave(sizes, output_size=total), self.positions)
        self._masks: dict[Hashable, torch.Tensor] = {}  # one for all layers in which the same tokens are visible

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        keys, values = self.cache.write(layer, k, v, self.places)
        if max(self.counts) == 1:
            return self._decode(q, keys, values, scores)
        parts: list[torch.Tensor] = []
        first = 0
        for i, (slot, cached, count) in enumerate(zip(self.slots, self.cached, self.counts, strict=True)):
            own_keys, own_values = (x[slot : slot + 1, : cached + count].transpose(1, 2) for x in (keys, values))
            own = q[None, :, first : first + count]
            parts.append(masked_attention(own, own_keys, own_values, self._mask(i, scores), scores)[0])
            first += count
        return torch.cat(parts, 1).transpose(0, 1)

    def by_rows(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.by_rows`: the sequences so far run again."""
        cached = self.cache.write_inputs(place, inputs, self.places)
        parts = []
        for slot, before, count in zip(self.slots, self.cached, self.counts, strict=True):
            tokens, hidden = (x[slot : slot + 1, : before + count, 0] for x in cached)
            out = run((tokens[..., 0], hidden)[: len(inputs)], None)
            parts.append(tuple(x[0, before:] for x in out))
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def recur(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.recur`. Slots that have as many new tokens run together, if both have tokens or both none."""
        parts: dict[int, tuple[torch.Tensor, ...]] = {}
        alike: dict[tuple[int, bool], list[int]] = {}
        for i, (before, count) in enumerate(zip(self.cached, self.counts, strict=True)):
            alike.setdefault((count, before > 0), []).append(i)
        split = [x.split(list(self.counts)) for x in inputs]
        held = torch.tensor(self.cached, device=self.at.device)
        for (count, continues), members in alike.items():
            chosen = torch.tensor(members, device=self.at.device)
            slots, counts = self.at[chosen], held[chosen]
            state = self.cache.read_states(place, slots, counts) if continues else SequenceState()
            out = run(tuple(torch.stack([x[i] for i in members]) for x in split), state)
            self.cache.write_states(place, state.tensors(), slots, counts + count)
            parts |= {i: tuple(x[j] for x in out) for j, i in enumerate(members)}
        return tuple(map(torch.cat, zip(*(parts[i] for i in range(len(parts))), strict=True)))

    def _mask(self, i: int, scores: Scores) -> torch.Tensor:
        """[1, 1, T, L] bool: what the new tokens of a slot see."""
        key = i, scores.masked
        if key not in self._masks:
            end = self.cached[i] + self.counts[i]
            at, columns = torch.arange(self.cached[i], end, device=self.cache.device)[:, None], self.cache.columns[:end]
            seen = scores.visible(at, columns)
            if self.blocks is not None:
                first = sum(self.counts[:i])
                of = self.blocks[first : first + self.counts[i]]
                near = columns[self.cached[i] :] > at - (scores.window or end)  # later tokens of a block are near
                seen[:, self.cached[i] :] |= (of[:, None] == of) & (of[:, None] >= 0) & near
            self._masks[key] = seen[None, None]
        return self._masks[key]

    def _decode(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> torch.Tensor:
        """One token for each slot. The slots need not be neighbors, so what they hold is copied."""
        kv_len = max(self.cached) + 1
        own_keys, own_values = (x[self.at, :kv_len].transpose(1, 2) for x in (keys, values))
        key = -1, scores.masked
        if key not in self._masks:
            self._masks[key] = scores.visible(self.positions[:, None], self.cache.columns[:kv_len])[:, None, None]
        return decode_attention(q, own_keys, own_values, self._masks[key], scores)
