"""One rank's part of a model on Megatron: the layers are Megatron's, everything around them is the torch backend's.

Pipelines, log-probs, losses, gradients and the optimizer, sampling and decoding only read a stage's hidden states and
parameters, whoever computes them; so they are the same code, and give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rldsl.backends.megatron.blocks import Block
from rldsl.backends.megatron.stage import MegatronStage
from rldsl.backends.torch.shard import TorchShard
from rldsl.backends.torch.train.optimizer import ShardOptimizer
from rldsl.runtime.backend import Shard
from rldsl.runtime.host_memory import HostMemory


class MegatronOptimizer(ShardOptimizer):
    """The gradients of Megatron's parameters are in the buffer of the HuggingFace parameters."""

    def _allocate_grads(self) -> None:
        super()._allocate_grads()
        for block in self._buffered_blocks():
            block.attach_grads()

    def offload(self, host: HostMemory) -> None:
        super().offload(host)
        for block in self._buffered_blocks():
            block.detach_grads()

    def _buffered_blocks(self) -> Sequence[Block]:
        """The blocks whose gradients are in one buffer: none under `zero`, where gradients are divided as they come."""
        stage = self.stage
        return stage.blocks if isinstance(stage, MegatronStage) and not stage.zero else ()


class MegatronShard(TorchShard):
    stage_class, trainer_class = MegatronStage, MegatronOptimizer

    def alias(self, other: Shard) -> None:
        if not isinstance(other, MegatronShard):
            raise TypeError("a copy cannot be shared by two backends")
        for block, other_block in zip(self.stage.blocks, other.stage.blocks, strict=True):
            block.set_memory(other_block.memory)

    def free(self) -> None:
        for block in self.stage.blocks:
            block.set_memory(block.memory.new_empty(()).expand(block.memory.shape))  # one element, but the same shape

    def allocate(self) -> None:
        for block in self.stage.blocks:
            block.set_memory(torch.empty(block.memory.shape, dtype=block.memory.dtype, device=self.device))

    def _memory(self) -> dict[str, torch.Tensor]:
        if self.stage.zero:
            return super()._memory()
        return {str(i): block.memory for i, block in enumerate(self.stage.blocks)}

    def _set_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.stage.zero:
            super()._set_memory(tensors)
            return
        for name, tensor in tensors.items():
            self.stage.blocks[int(name)].set_memory(tensor)
