"""A run of a model's layers on one pipeline stage.

In: the family's model without its head. Out: a `Chunk`, the same model with `PassThroughLayer`s in place of the layers
of other chunks, so that the family's forward runs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.model.skeleton import shallow_copy
from rldsl.sharding.layout import stage_layers


class PassThroughLayer(nn.Module):
    """In place of a layer of another chunk. The last one before a chunk's own layers inserts the hidden states that the
    previous chunk sent, whatever the family's forward did to its input before (some scale embeddings)."""

    received: torch.Tensor | None = None  # [1, T, H] during a forward pass

    def __init__(self, layer: nn.Module, outputs: int = 0):
        """layer: in whose place it is. outputs: see `Execution.outputs`."""
        super().__init__()
        self.outputs = outputs
        vars(self)["layer"] = layer  # not a child: its parameters are elsewhere

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_states if self.received is None else self.received
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden

    def __getattr__(self, name: str) -> Any:
        """What a family's model asks its layers, such as their kind."""
        return getattr(vars(self)["layer"], name)


class LayersDone(Exception):
    """Ends the forward of a family's model after a chunk's last layer, if that is not the model's last one."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers, and the family's model with only these."""

    body: nn.Module          # the family's model without its head
    own: nn.ModuleList       # the list of layers inside, with `PassThroughLayer`s in place of those of other chunks
    entry: PassThroughLayer | None  # where received hidden states come in; None in the first chunk
    layers: range            # numbers of its layers in the whole model
    first: bool              # whether it has the model's first layers
    last: bool               # whether it has the model's last layers

    def own_layers(self) -> Iterator[tuple[int, nn.Module]]:
        """(number, layer)"""
        return ((i, layer) for i, layer in enumerate(self.own) if not isinstance(layer, PassThroughLayer))


def chunk_of(whole_body: Any, name: str, outputs: int, number: int, count: int, layers: int) -> Chunk:
    """One of `count` runs of all `layers`: the same modules in a separate body, with pass-through modules in place of
    what belongs to other runs. name: of the list of layers in the body, "" if it has none. outputs: see `Execution`."""
    own_layers, body = stage_layers(layers, count, number), whole_body
    if not name:
        return Chunk(body, nn.ModuleList(), None, own_layers, True, True)
    path = name.split(".")
    body = parent = shallow_copy(whole_body)
    for step in path[:-1]:
        parent._modules[step] = parent = shallow_copy(parent._modules[step])
    every = [layer if i in own_layers else PassThroughLayer(layer, outputs)
             for i, layer in enumerate(parent._modules[path[-1]])]
    own, entry = nn.ModuleList(every), every[own_layers.start - 1] if own_layers.start else None
    parent._modules[path[-1]] = own
    return Chunk(body, own, entry, own_layers, number == 0, number == count - 1)


def end_of_layers(_: nn.Module, __: Any, out: Any) -> None:
    raise LayersDone(out[0] if isinstance(out, tuple | list) else out)
