"""Keys and values of many sequences in one place, and the packings that write and read them.

In: what attention gets in a forward pass. Out: its result; keys and values are in the slab. `Prefill` fills slots with
whole prompts, one prompt perhaps several slots; `Decode` appends one token for each slot of a run and reads the slab in
place. A slot's tokens lie together, heads inside a token: [slots, width, K, D], as flash-attn's kernels want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rldsl.backends.torch.kernels.decode_attention import reader
from rldsl.backends.torch.model.attention import Varlen

from rldsl.runtime.store import within


@dataclass
class Slab:
    """Room for `slots` sequences of at most `width` tokens: a pair of [slots, width, K, D] for each layer.

    starts [slots]: the first of a slot's places; columns [width]: 0, 1, ..."""

    slots: int
    width: int
    device: torch.device
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    shade: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.starts = torch.arange(self.slots, device=self.device) * self.width
        self.columns = torch.arange(self.width, device=self.device)

    def of(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v: any [K, T, D] of this layer."""
        if layer not in self.layers:  # zeros: what no query sees must be finite
            keys, values = (x.new_zeros(self.slots, self.width, x.shape[0], x.shape[2]) for x in (k, v))
            self.layers[layer] = (keys, values)
        return self.layers[layer]

    def shades(self, dtype: torch.dtype) -> torch.Tensor:
        """[2]: what a mask adds to the score of a token that is seen, and of one that is not; made once."""
        if dtype not in self.shade:
            self.shade[dtype] = torch.tensor([0.0, -torch.inf], dtype=dtype, device=self.device)
        return self.shade[dtype]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, into: torch.Tensor,
              source: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Token source[i] of k and v (token i without `source`) goes to place into[i] of the slab's slots * width."""
        pair = self.of(layer, k, v)
        for held, x in zip(pair, (k, v)):
            tokens = x.transpose(0, 1)
            held.flatten(0, 1).index_copy_(0, into, tokens if source is None else tokens[source])
        return pair

    def copy(self, sources: Sequence[int], into: Sequence[int], width: int) -> None:
        """The first `width` tokens of some slots to others, all at once."""
        for pair in self.layers.values():
            for held in pair:
                held[list(into), :width] = held[list(sources), :width]


class Prefill(Varlen):
    """Causal attention in each of U packed prompts; the prompt numbered prompt[i] is kept in slots[i]. lengths: [U]."""

    def __init__(self, slab: Slab, lengths: torch.Tensor, slots: torch.Tensor, prompt: torch.Tensor):
        super().__init__(lengths)
        each = lengths[prompt]
        at = within(each)
        self.slab, self.into = slab, slab.starts[slots].repeat_interleave(each) + at
        starts = lengths.cumsum(0) - lengths
        self.source = starts[prompt].repeat_interleave(each) + at if len(prompt) > len(lengths) else None

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        self.slab.write(layer, k, v, self.into, self.source)
        return super().attend(layer, q, k, v, scale, window)


class Decode:
    """One new token for each of the S slots from `first` on; positions [S]: their places in their sequences. width: at
    least the largest of them plus 1; what is read of a slot."""

    def __init__(self, slab: Slab, first: int, positions: torch.Tensor, width: int):
        self.slab, self.rows, self.positions, self.width = slab, slice(first, first + len(positions)), positions, width
        self.into = slab.starts[self.rows] + positions
        self.masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}  # one for all layers of a kind

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
               window: int | None) -> torch.Tensor:
        """The queries that share a head of keys stand where a longer sequence would have its queries, so that nothing
        is repeated."""
        pair = self.slab.write(layer, k, v, self.into)
        if (read := reader(q)) is not None:
            return read(q.transpose(0, 1), *pair, self.rows.start, self.positions, self.width, scale, window)
        keys, values = (x[self.rows, : self.width].transpose(1, 2) for x in pair)
        q = q.transpose(0, 1).unflatten(1, (k.shape[0], -1))  # [S, K, H / K, D]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask(window, q.dtype), scale=scale)
        return out.flatten(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[S, 1, 1, width], 0 or -inf."""
        if (window, dtype) not in self.masks:
            at, columns = self.positions[:, None], self.slab.columns[: self.width]
            seen = columns <= at if window is None else (columns <= at) & (columns > at - window)
            open, shut = self.slab.shades(dtype)
            self.masks[window, dtype] = torch.where(seen, open, shut)[:, None, None]
        return self.masks[window, dtype]
