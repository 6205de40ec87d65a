"""The KV cache of a generate call, and the attention that writes and reads it.

In: queries, keys and values of a forward pass. Out: the attention output; keys and values are in the cache.
`PrefillAttention` writes whole prompts, one prompt perhaps into several slots; `DecodeAttention` appends one token to
each slot of a run and reads the cache in place. A cache is [slots, width, K, D], as flash-attn's kernels want it. In
memory heads are inside a token on a GPU; on the CPU the tokens of a head are contiguous, since attention reads one head
after the other there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rldsl.backends.torch.generate.dynamic_size import DynamicSize
from rldsl.backends.torch.generate.sequence_states import SequenceState, StateKey, StateTensors
from rldsl.backends.torch.kernels import cpu_kernels, ordered_kernels
from rldsl.backends.torch.kernels.attention_kernels import decode_kernel
from rldsl.backends.torch.model.attention import Scores, VarlenAttention, decode_attention, decode_by_products
from rldsl.backends.torch.model.sequences import RowFunction
from rldsl.runtime.store import offsets_within

TokenPlaces = tuple[torch.Tensor, ...]  # where some tokens are in a cache, as `KVCache.places` says
HostSlot = tuple[torch.Tensor, ...]  # all that a slot holds, in host memory; () of nothing


@dataclass
class KVCache:
    """Memory for `num_slots` sequences of at most `width` tokens."""

    num_slots: int  # sequences that it can hold
    width: int  # tokens per slot
    device: torch.device  # on which it is
    # number -> keys and values of an attention module, or the inputs of a function that needs complete sequences:
    # [slots, width, K, D] each
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    # place of a recurrent module -> states of its slots, [2, slots, ...] each: those after an even and after an odd
    # number of tokens. A step reads one and writes the other, so that it can be run twice
    states: dict[int, dict[StateKey, torch.Tensor]] = field(default_factory=dict)
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)                # see `mask_values`
    slot_numbers: torch.Tensor = field(init=False)  # [slots] 0, 1, ...
    columns: torch.Tensor = field(init=False)       # [width] 0, 1, ...
    heads_first: bool = field(init=False)           # the order in memory: [slots, K, width, D]

    def __post_init__(self) -> None:
        self.slot_numbers = torch.arange(self.num_slots, device=self.device)
        self.columns = torch.arange(self.width, device=self.device)
        self.heads_first = self.device.type == "cpu"

    def places(self, slots: torch.Tensor, columns: torch.Tensor) -> TokenPlaces:
        """Of tokens at columns [n] of slots [n]: both, or what they are among all slots * width, if that is a dimension
        in memory."""
        return (slots, columns) if self.heads_first else (slots * self.width + columns,)

    def put(self, cached: torch.Tensor, places: TokenPlaces, x: torch.Tensor) -> None:
        """Write tokens x [n, K, D] to a cache."""
        if self.heads_first:
            cached.index_put_(places, x)
        else:
            cached.flatten(0, 1).index_copy_(0, places[0], x)

    def take(self, cached: torch.Tensor, places: TokenPlaces) -> torch.Tensor:
        """[n, K, D]: a copy of tokens of a cache."""
        return cached[places] if self.heads_first else cached.flatten(0, 1)[places[0]]

    def layer(self, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, allocated at first use. k, v: any [K, T, D] of this layer."""
        if index not in self.layers:  # zeros: masked scores are multiplied by values too, which must be finite
            self.layers[index] = self._empty(k), self._empty(v)
        return self.layers[index]

    def _empty(self, x: torch.Tensor) -> torch.Tensor:
        heads, size = x.shape[0], x.shape[2]
        if self.heads_first:
            return x.new_zeros(self.num_slots, heads, self.width, size).transpose(1, 2)
        return x.new_zeros(self.num_slots, self.width, heads, size)

    def mask_values(self, dtype: torch.dtype) -> torch.Tensor:
        """[2]: what a mask adds to the score of a visible and of a hidden token. Made once, so that a captured decode
        step refers to a tensor that stays; on the device, since a step that copies from the host is not captured."""
        if dtype not in self.masks:
            self.masks[dtype] = torch.zeros(2, dtype=dtype, device=self.device)
            self.masks[dtype][1].fill_(-torch.inf)
        return self.masks[dtype]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, places: TokenPlaces,
              source: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Write token source[i] of k and v (token i without `source`) to the i-th of n places. k, v: [K, T, D]; source:
        [n] int64. Returns the layer's keys and values."""
        cached = self.layer(layer, k, v)
        for cache, x in zip(cached, (k, v), strict=True):
            tokens = x.transpose(0, 1)
            self.put(cache, places, tokens if source is None else tokens[source])
        return cached

    def write_inputs(self, place: int, inputs: tuple[torch.Tensor, ...], places: TokenPlaces,
                     source: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what a function that needs complete sequences is given: [T] of tokens, and [T, H] if it has more."""
        tokens, hidden = inputs[0], inputs[1] if len(inputs) > 1 else inputs[0].new_empty(len(inputs[0]), 0)
        return self.write(-1 - place, tokens[None, :, None], hidden[None], places, source)

    def write_states(self, place: int, tensors: StateTensors, slots: torch.Tensor, counts: torch.Tensor,
                     source: torch.Tensor | None = None) -> None:
        """Write row source[i] of states (row i without `source`) to slots[i], as those after counts[i] tokens."""
        held = self.states.setdefault(place, {})
        for key, x in tensors.items():
            if key not in held:
                held[key] = x.new_zeros(2, self.num_slots, *x.shape[1:])
            held[key][counts % 2, slots] = x if source is None else x[source]

    def read_states(self, place: int, slots: torch.Tensor, counts: torch.Tensor) -> SequenceState:
        """A copy of the states of some slots after counts[i] tokens."""
        return SequenceState({key: x[counts % 2, slots] for key, x in self.states[place].items()})

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory."""
        for cached in self.layers.values():
            yield from cached
        for held in self.states.values():
            yield from held.values()

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of some slots to others, all at once, and their states."""
        held = [x for states in self.states.values() for x in states.values()]
        caches = [x for cached in self.layers.values() for x in cached]
        if not held and not caches:
            return
        device = (caches or held)[0].device  # one copy to it, and not one for each layer
        source, target = torch.tensor([list(sources), list(targets)], dtype=torch.int64, device=device)
        for cache in caches:
            cache[target, :length] = cache[source, :length]
        for x in held:
            x[:, target] = x[:, source]

    def offload(self, slot: int, length: int) -> HostSlot:
        """Copy the first `length` tokens of a slot and its states to host memory."""
        return tuple(x.to("cpu", copy=True) for x in self._held(slot, length)) if length else ()

    def onload(self, slot: int, length: int, copies: HostSlot) -> None:
        """Copy back what `offload` returned, perhaps to another slot."""
        for x, copy in zip(self._held(slot, length) if copies else (), copies, strict=True):
            x.copy_(copy)

    def _held(self, slot: int, length: int) -> Iterator[torch.Tensor]:
        """The memory of a slot's first `length` tokens and of its states, in the same order for every slot."""
        for cached in self.layers.values():
            yield from (x[slot, :length] for x in cached)
        for states in self.states.values():
            yield from (x[:, slot] for x in states.values())


class PrefillAttention(VarlenAttention):
    """Causal attention in each of U packed prompts, whose keys and values go to the cache."""

    def __init__(self, cache: KVCache, lengths: torch.Tensor, slots: torch.Tensor, prompt: torch.Tensor):
        """lengths: [U] of the prompts. slots[i] gets the prompt numbered prompt[i]; both [n], n >= U."""
        super().__init__(lengths)
        self.slots, self.prompt = slots, prompt
        copied = lengths[prompt]
        column = offsets_within(copied)
        self.cache, self.places = cache, cache.places(slots.repeat_interleave(copied), column)
        starts = lengths.cumsum(0) - lengths
        repeats = len(prompt) > len(lengths)
        self.source = starts[prompt].repeat_interleave(copied) + column if repeats else None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        if self.cache.heads_first and all(map(cpu_kernels.writes, self.cache.layer(layer, k, v), (k, v))):
            slots, columns = self.places
            for cache, x in zip(self.cache.layer(layer, k, v), (k, v), strict=True):
                cpu_kernels.write_tokens(cache, x, slots, columns, self.source)
        else:
            self.cache.write(layer, k, v, self.places, self.source)
        return super().attend(layer, q, k, v, scores)

    def by_rows(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.by_rows`."""
        self.cache.write_inputs(place, inputs, self.places, self.source)
        return super().by_rows(place, run, inputs)

    def recur(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.recur`. Padding would change a state, so only prompts of one length run together."""
        starts = self.lengths.cumsum(0) - self.lengths
        parts: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        for length in self.lengths.unique().tolist():
            alike = (self.lengths == length).nonzero()[:, 0]
            at = (starts[alike, None] + torch.arange(length, device=starts.device)).flatten()
            state = SequenceState()
            out = run(tuple(x[at].unflatten(0, (-1, length)) for x in inputs), state)
            row = torch.full_like(self.lengths, -1).index_copy(0, alike, torch.arange(len(alike), device=at.device))
            chosen = (row[self.prompt] >= 0).nonzero()[:, 0]
            self.cache.write_states(place, state.tensors(), self.slots[chosen], self.lengths[self.prompt][chosen],
                                    row[self.prompt][chosen])
            parts.append((at, tuple(x.flatten(0, 1) for x in out)))
        order = torch.cat([at for at, _ in parts]).argsort()
        return tuple(torch.cat(x)[order] for x in zip(*(out for _, out in parts), strict=True))


class DecodeAttention:
    """Attention of one new token for each of the S slots from `first` on."""

    complete = False

    def __init__(self, cache: KVCache, first: int, positions: torch.Tensor, kv_len: DynamicSize,
                 by_products: bool = False, ordered_heads: Collection[int] = ()):
        """positions: [S] of the new tokens in their sequences. kv_len: how many tokens of a slot are read, at least the
        largest position plus 1; not read by kernels that find all lengths in the positions. by_products: with float32
        numbers by batched products. ordered_heads: sizes of heads whose attention `ordered_kernels` compute as an
        invariant model does."""
        self.by_products = by_products and cache.heads_first
        self.ordered_heads = ordered_heads if cache.heads_first else ()
        self.cache, self.slots = cache, slice(first, first + len(positions))
        self.positions, self._kv_len = positions, kv_len
        self.places = cache.places(cache.slot_numbers[self.slots], positions)
        self._masks: dict[Hashable, torch.Tensor] = {}  # one for all layers in which the same tokens are visible

    @property
    def kv_len(self) -> int:
        """How many tokens of a slot are read. Whoever asks makes the step one of this length alone."""
        return self._kv_len.read()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
        """See `PackedAttention.attend`."""
        if self.by_products and scores.plain and cpu_kernels.attends(q, k, v):
            keys, values = (x[self.slots] for x in self.cache.layer(layer, k, v))
            return cpu_kernels.decode_attention(q, k, v, keys, values, self.positions, scores.scale, scores.window)
        if q.shape[-1] in self.ordered_heads and scores.plain and ordered_kernels.attends(q, k, v):
            keys, values = (x[self.slots] for x in self.cache.layer(layer, k, v))
            return ordered_kernels.decode_attention(q, k, v, keys, values, self.positions, self.kv_len, scores.scale,
                                                    scores.window)
        cached = self.cache.write(layer, k, v, self.places)
        if (kernel := decode_kernel(q)) is not None and scores.plain and q.shape[-1] == v.shape[-1]:
            return kernel(q.transpose(0, 1), *cached, self.slots.start, self.positions, self.kv_len, scores.scale,
                          scores.window)
        keys, values = (x[self.slots, : self.kv_len].transpose(1, 2) for x in cached)
        if self.by_products and scores.plain_softmax and q.dtype == torch.float32:
            return decode_by_products(q, keys, values, self._mask(scores, q.dtype, keys.shape[1]), scores.scale)
        return decode_attention(q, keys, values, self._mask(scores, q.dtype), scores)

    def by_rows(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.by_rows`: the sequences so far run again."""
        cached = self.cache.write_inputs(place, inputs, self.places)
        tokens, hidden = (x[self.slots, : self.kv_len, 0] for x in cached)
        out = run((tokens[..., 0], hidden)[: len(inputs)], None)
        at = torch.arange(len(self.positions), device=self.positions.device)
        return tuple(x[at, self.positions] for x in out)

    def recur(self, place: int, run: RowFunction, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """See `Sequences.recur`."""
        slots = torch.arange(self.slots.start, self.slots.stop, device=self.positions.device)
        state = self.cache.read_states(place, slots, self.positions)
        out = run(tuple(x[:, None] for x in inputs), state)
        self.cache.write_states(place, state.tensors(), slots, self.positions + 1)
        return tuple(x[:, 0] for x in out)

    def _mask(self, scores: Scores, dtype: torch.dtype, heads: int = 0) -> torch.Tensor:
        """[S, 1, 1, kv_len], 0 or -inf. heads: 0, or the number of heads, for [S * heads, 1, kv_len]."""
        key = scores.masked, dtype, heads
        if heads and key not in self._masks:
            self._masks[key] = self._mask(scores, dtype).expand(-1, heads, -1, -1).flatten(0, 1)
        if key not in self._masks:
            visible = scores.visible(self.positions[:, None], self.cache.columns[: self.kv_len])
            zero, minus_inf = self.cache.mask_values(dtype)
            self._masks[key] = torch.where(visible, zero, minus_inf)[:, None, None]
        return self._masks[key]
