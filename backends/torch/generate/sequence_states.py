"""The states that recurrent layers carry from token to token, as transformers' modules read and write them.

In: tensors of a layer's state, one row for each sequence. Out: a `SequenceState`, which such a module takes for its
cache. A state does not grow with its sequence: the last inputs of a short convolution, and what the recurrence sums up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

MAX_STATES = 8  # that one module may have of a kind

StateKey = tuple[str, int]  # "conv" or "recurrent", and the number of the state among those of its kind
StateTensors = Mapping[StateKey, torch.Tensor]  # [S, ...] each


class SequenceState(Cache):
    """A cache of one layer, whatever the number by which the layer asks."""

    def __init__(self, before: StateTensors | None = None):
        """before: the state of each sequence so far; None: sequences begin."""
        self.continues = bool(before)
        layer: Any = LinearAttentionLayer(number_of_states=MAX_STATES)
        for (kind, number), x in (before or {}).items():
            layer.dtype, layer.device = x.dtype, x.device
            layer.has_previous_state[number] = True
            if kind == "conv":
                layer.conv_states[number], layer.conv_kernel_size[number] = x, x.shape[-1]
                layer.is_conv_states_initialized[number] = True
            else:
                layer.recurrent_states[number] = x
                layer.is_recurrent_states_initialized[number] = True
        super().__init__(layers=[layer])
        self.layers = _Everywhere(layer)

    def tensors(self) -> StateTensors:
        """What the state is now."""
        layer: Any = self.layers[0]
        found: dict[StateKey, torch.Tensor] = {}
        for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            found |= {(kind, i): x for i, x in states.items() if x is not None}
        return found


class _Everywhere(list[Any]):
    """A list that has the same item at every place."""

    def __init__(self, item: Any):
        super().__init__([item])

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)
