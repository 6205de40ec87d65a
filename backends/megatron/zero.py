"""What a rank stores under `zero=1`, Megatron's distributed optimizer, and how it becomes complete.

In: rows of HuggingFace parameters, and blocks that are filled from the rows of all shards for a minibatch.
Out: `BlockParamGroup`, a parameter group of the torch backend's `zero.py`. What Megatron computes with is joined from
several parameters, or is one of many experts, so its gradient is split into theirs when it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from rldsl.backends.megatron.blocks import Block, ModuleTensor
from rldsl.backends.torch.model.zero import ParamGroup
from rldsl.runtime.backend import Axis


class BlockParamGroup(ParamGroup):
    """Blocks that are unsharded together. Their memory exists from `unshard` to `reshard`."""

    def __init__(self, sharded: Sequence[nn.Parameter], blocks: Sequence[Block], dp: Axis):
        """sharded: this rank's rows of the blocks' HuggingFace parameters, in order."""
        super().__init__(sharded, [p for block in blocks for p in block.hf_parameters.values()], dp)
        self.blocks, first = blocks, 0
        for block in blocks:
            for target, parameter in block.separate_parameters():
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(partial(self._split_grad, block, first, target))
            first += len(block.hf_parameters)

    def allocate_unsharded(self) -> None:
        for block in self.blocks:
            block.memory.untyped_storage().resize_(block.memory.numel() * block.memory.element_size())

    @torch.no_grad()
    def _split_grad(self, block: Block, first: int, target: ModuleTensor, parameter: torch.Tensor) -> None:
        """The hook that autograd calls when the gradient of a module's parameter is there: split it. first: the number
        of the block's first HuggingFace parameter."""
        if parameter.grad is None:
            raise RuntimeError("autograd called the hook of a parameter without a gradient")
        grad, parameter.grad = parameter.grad.float(), None
        pieces = [(first, grad)] if target.index is not None else [
            (first + i, piece) for i, piece in enumerate(grad.split(list(block.rows.values())))]
        for i, piece in pieces:
            if i not in self.unsharded_grads:
                self.unsharded_grads[i] = torch.zeros_like(self.unsharded[i], dtype=torch.float32)
            total = self.unsharded_grads[i]
            (total if target.index is None else total[target.index]).add_(piece)
