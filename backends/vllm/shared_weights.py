"""Weights that lie in memory which another process maps too, so that none of them are sent.

The memory has no name: it is a file descriptor that a child process inherits, and it is gone with the last process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod

import torch

ALIGNMENT = 64  # bytes


class SharedWeights:
    """Room for tensors, in the order of their names."""

    def __init__(self, kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        """kinds: shape and dtype of each."""
        self.offsets: dict[str, int] = {}
        end = 0
        for name, (shape, dtype) in kinds.items():
            self.offsets[name] = end
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.size = max(end, 1)
        self.descriptor = os.memfd_create("rldsl-weights")
        os.ftruncate(self.descriptor, self.size)
        self._memory = mmap.mmap(self.descriptor, self.size)
        # parameter name -> tensor in the memory
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self.offsets[name]).view(shape)
            for name, (shape, dtype) in kinds.items()}

    def records(self) -> list[tuple[str, str, list[int], int]]:
        """(name, dtype, shape, offset in bytes) of each tensor, as the other process needs them."""
        return [(name, str(x.dtype).removeprefix("torch."), list(x.shape), self.offsets[name])
                for name, x in self.tensors.items()]

    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the values of tensors that lie somewhere else."""
        for name, tensor in tensors.items():
            if tensor.data_ptr() != self.tensors[name].data_ptr():
                self.tensors[name].copy_(tensor)

    def release(self) -> None:
        """Give the pages back to the system; what is read next is 0 until it is written."""
        self._memory.madvise(mmap.MADV_REMOVE)
