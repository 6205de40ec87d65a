"""What a generate call holds with vLLM: the torch backend's KV cache and buffers, and the engine's own copy of the
weights. Between calls the engine keeps both, but for a copy with `offload=true` on a GPU; the estimate has them during
the call alone. Of a model with adapters the rank has merged weights, too, in the memory that the engine maps."""

from __future__ import annotations

from math import prod
from typing import Any

from rldsl.memory.call_memory import MemoryCosts
from rldsl.memory.call_parts import Needs
from rldsl.memory.parameters import Copy
from rldsl.memory.values import Tables


class VllmMemory(MemoryCosts):
    def generate(self, tables: Tables, event: Any, copy: Copy, device: str) -> Needs:
        elements = sum(prod(spec.shape) * max(len(tuple(spec.layer_numbers(copy.model.layers))), 1)
                       for spec in copy.model.base or copy.model.params)
        merged = {"merged weights": copy.compute * elements} if copy.model.base and device == "cpu" else {}
        return {**super().generate(tables, event, copy, device), "weights of the engine": copy.compute * elements,
                **merged}
