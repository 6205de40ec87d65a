"""One rank's part of a model on Megatron: what it computes with is Megatron's, everything around that the torch
backend's.

Passes through pipelines, log-probs, losses, gradients and the optimizer, sampling and decoding ask a stage for hidden
states and parameters, whoever computes them; so they are the same code, and the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rldsl.backends.megatron.stage import MegatronStage
from rldsl.backends.torch.model.offload import Host
from rldsl.backends.torch.shard import TorchShard
from rldsl.backends.torch.train.optimizer import Trainer

from rldsl.runtime.backend import Shard


class MegatronTrainer(Trainer):
    """Gradients of Megatron's tensors come into the buffer of those that they are made of."""

    def _gradients(self) -> None:
        super()._gradients()
        for block in [] if self.stage.sharded else self.stage.blocks:
            block.follow()

    def away(self, host: Host) -> None:
        super().away(host)
        for block in [] if self.stage.sharded else self.stage.blocks:
            block.forget()


class MegatronShard(TorchShard):
    stages, trainers = MegatronStage, MegatronTrainer

    def alias(self, other: Shard) -> None:
        assert isinstance(other, MegatronShard), "one copy under two backends"
        for mine, theirs in zip(self.stage.blocks, other.stage.blocks, strict=True):
            mine.put(theirs.memory)

    def free(self) -> None:
        for block in self.stage.blocks:
            block.put(block.memory.new_empty(()).expand(block.memory.shape))  # one element, and the shape

    def allocate(self) -> None:
        for block in self.stage.blocks:
            block.put(torch.empty(block.memory.shape, dtype=block.memory.dtype, device=self.device))

    def _resident(self) -> dict[str, torch.Tensor]:
        if self.stage.sharded:
            return super()._resident()
        return {str(i): block.memory for i, block in enumerate(self.stage.blocks)}

    def _place(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.stage.sharded:
            super()._place(tensors)
            return
        for name, tensor in tensors.items():
            self.stage.blocks[int(name)].put(tensor)
