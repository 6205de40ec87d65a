"""Tensors of a shard that are in host memory for a while.

In: tensors by name. Out: the same ones on the other side. Where the device is the host nothing moves. On CUDA host
memory is pinned and stays so, since pinning is slow; the way there is waited for, so that the device's memory is free
afterwards, and the way back runs beside other kernels on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Tensors = dict[str, torch.Tensor]


class Host:
    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pinned: Tensors = {}

    @torch.no_grad()
    def away(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """In host memory."""
        if self.stream is None:
            return dict(tensors)
        for name, tensor in tensors.items():
            if name not in self.pinned:
                self.pinned[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self.pinned[name].copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return {name: self.pinned[name] for name in tensors}

    @torch.no_grad()
    def back(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Callable[[], None]]:
        """On the device; they have their values for what is issued after a call of the second result."""
        stream = self.stream
        if stream is None:
            return dict(tensors), lambda: None
        made = {name: torch.empty_like(tensor, device=self.device) for name, tensor in tensors.items()}
        stream.wait_stream(torch.cuda.current_stream(self.device))  # their memory may still be in use there
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                made[name].copy_(tensor, non_blocking=True)
        return made, lambda: torch.cuda.current_stream(self.device).wait_stream(stream)
