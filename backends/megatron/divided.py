"""What a rank keeps at rest under `zero=1`, Megatron's distributed optimizer, and how it becomes whole.

In: rows of HuggingFace parameters, and blocks that are filled from the rows of all shards for a minibatch.
Out: `Joined`, a unit of the torch backend's `zero.py`: what Megatron computes with is joined of several parameters, or
one of many experts, so its gradient is divided into theirs as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from rldsl.backends.megatron.blocks import Block, Seat
from rldsl.backends.torch.model.zero import Unit
from torch import nn

from rldsl.runtime.backend import Axis


class Joined(Unit):
    """blocks: whose parts, in order, have `rows`. Their memory is there from `gather` to `drop`."""

    def __init__(self, rows: Sequence[nn.Parameter], blocks: Sequence[Block], dp: Axis):
        super().__init__(rows, [part for block in blocks for part in block.parts.values()], dp)
        self.blocks, first = blocks, 0
        for block in blocks:
            for seat, seen in block.apart():
                seen.requires_grad_(True)
                seen.register_post_accumulate_grad_hook(partial(self.divide, block, first, seat))
            first += len(block.parts)

    def room(self) -> None:
        for block in self.blocks:
            block.memory.untyped_storage().resize_(block.memory.numel() * block.memory.element_size())

    @torch.no_grad()
    def divide(self, block: Block, first: int, seat: Seat, seen: torch.Tensor) -> None:
        """A gradient of what a module sees has come. first: the number of the block's first part."""
        assert seen.grad is not None
        slope, seen.grad = seen.grad.float(), None
        pieces = [(first, slope)] if seat.at is not None else [
            (first + i, piece) for i, piece in enumerate(slope.split(list(block.rows.values())))]
        for i, piece in pieces:
            if i not in self.slopes:
                self.slopes[i] = torch.zeros_like(self.whole[i], dtype=torch.float32)
            (self.slopes[i] if seat.at is None else self.slopes[i][seat.at]).add_(piece)
