"""Keys and values of finished sequences, kept after their generate call so that another call continues them.

In: the slots of a KV cache whose sequences have finished. Out: `KeptCache`, packed, from which a later call of the same
shard fills its slots: what a sequence begins with need not be run through the model again.
Invariant: the keys and values are those that the model computed, bit for bit; they hold while its parameters do.

The last token of a sequence was sampled and never run, so a sequence of L tokens has L - 1 here. What continues it, or
a prefix of it, runs the last token of its prompt in its first decode step, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rldsl.backends.torch.generate.kv_cache import KVCache
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.store import offsets_within, ragged_indices

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # [T, K, D] each: tokens, heads, width of a head


@dataclass(frozen=True, slots=True)
class KeptCache:
    """What a rank keeps of the sequences of one call: the heads and the layers that it has."""

    lengths: torch.Tensor  # [N] int64, tokens of each sequence; 0 where it has none
    starts: torch.Tensor   # [N] int64, where they begin among all tokens
    layers: dict[int, KeysAndValues]  # layer -> keys and values of all tokens, one sequence after the other

    def fill(self, cache: KVCache, sequences: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor) -> None:
        """Copy the first lengths[i] tokens of sequences[i] to slots[i]; all [n]."""
        if bool((lengths > self.lengths[sequences]).any()):
            raise RuntimeError("a sequence continues more tokens than were kept of it")
        source = ragged_indices(self.starts, sequences, lengths)
        target = cache.places(slots.repeat_interleave(lengths), offsets_within(lengths))
        for index, pair in self.layers.items():
            for cached, x in zip(cache.layer(index, *(x.transpose(0, 1) for x in pair)), pair, strict=True):
                cache.put(cached, target, x[source])

    def spread_out(self, chosen: torch.Tensor) -> KeptCache:
        """The same for more sequences, of which these are the `chosen` ones ([N] bool)."""
        lengths, starts = torch.zeros(2, len(chosen), dtype=torch.long, device=chosen.device)
        lengths[chosen], starts[chosen] = self.lengths, self.starts
        return KeptCache(lengths, starts, self.layers)


@dataclass
class CacheKeeper:
    """Collects the sequences of one call as they finish."""

    count: int  # sequences of the call
    # (numbers of the sequences, their lengths, layer -> keys and values), per group that finished
    parts: list[tuple[torch.Tensor, torch.Tensor, dict[int, KeysAndValues]]] = field(default_factory=list)

    def keep(self, cache: KVCache, slots: Sequence[int], sequences: torch.Tensor, lengths: torch.Tensor) -> None:
        """Copy the first lengths[i] tokens of slots[i], which are those of sequences[i]."""
        at = on_device(slots, lengths.device).repeat_interleave(lengths)
        places = cache.places(at, offsets_within(lengths))
        layers = {i: (cache.take(k, places), cache.take(v, places)) for i, (k, v) in cache.layers.items()}
        self.parts.append((sequences, lengths, layers))

    def kept(self, device: torch.device) -> KeptCache:
        """Everything that was collected; the parts are given up layer by layer."""
        lengths, starts = torch.zeros(2, self.count, dtype=torch.long, device=device)
        if not self.parts:
            return KeptCache(lengths, starts, {})
        sequences, sizes = (torch.cat(x) for x in zip(*((p[0], p[1]) for p in self.parts), strict=True))
        lengths[sequences], starts[sequences] = sizes, sizes.cumsum(0) - sizes
        layers: dict[int, KeysAndValues] = {}
        for index in sorted(self.parts[0][2]):
            keys, values = zip(*(p[2].pop(index) for p in self.parts), strict=True)
            layers[index] = torch.cat(keys), torch.cat(values)
        return KeptCache(lengths, starts, layers)
