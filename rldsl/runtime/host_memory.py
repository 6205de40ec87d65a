"""Tensors that are in host memory for a while: offloaded ones, and those of a checkpoint.

In: tensors by name. Out: the same tensors on the other side. Where the device is the CPU nothing moves. For CUDA, host
memory is pinned and is kept, since pinning is slow; an offload is waited for, so that the device's memory is free
afterwards, and an onload runs concurrently with other kernels on its own stream.

Host memory is one tensor per dtype that is registered with CUDA: torch's allocator of pinned memory would round each
tensor up to a power of two.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping

import torch

PAGE = mmap.PAGESIZE  # bytes

Tensors = dict[str, torch.Tensor]


class HostMemory:
    """The host memory of one shard, or of the checkpoints of a rank."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pinned: Tensors = {}
        self._registered: list[torch.Tensor] = []
        # memory that is freed while it is registered would fail the next registration at its address
        weakref.finalize(self, _unregister, self._registered).atexit = False  # CUDA may be gone by then

    @torch.no_grad()
    def offload(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Copy tensors to host memory. Returns the copies, with the strides of dense tensors."""
        return dict(tensors) if self.stream is None else self._pinned_copies(tensors, torch.preserve_format)

    def _pinned_copies(self, tensors: Mapping[str, torch.Tensor], strides: torch.memory_format) -> Tensors:
        self._allocate({name: x for name, x in tensors.items() if name not in self.pinned}, strides)
        for name, tensor in tensors.items():
            self.pinned[name].copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return {name: self.pinned[name] for name in tensors}

    @torch.no_grad()
    def copies(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Contiguous copies in host memory, which stay as they are until the next call."""
        if self.stream is None:
            return {name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()}
        return self._pinned_copies(tensors, torch.contiguous_format)

    def _allocate(self, tensors: Mapping[str, torch.Tensor], strides: torch.memory_format) -> None:
        """Pinned memory for tensors, in `pinned`."""
        for dtype in dict.fromkeys(x.dtype for x in tensors.values()):
            chosen = {name: x for name, x in tensors.items() if x.dtype == dtype}
            flat = self._registered_memory(sum(x.numel() for x in chosen.values()), dtype)
            parts = flat.split([x.numel() for x in chosen.values()])
            for (name, x), part in zip(chosen.items(), parts, strict=True):
                like = torch.empty_like(x, device="meta", memory_format=strides)
                self.pinned[name] = part.as_strided(like.shape, like.stride())

    def _registered_memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count] in separate pages: CUDA registers whole pages, and each of them once. A tensor's memory begins
        with a page, since torch asks for that address whether a tensor is pinned."""
        size = -(-count * dtype.itemsize // PAGE) * PAGE
        if not size:
            return torch.empty(0, dtype=dtype, device="cpu")
        pages = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), size, 0))
        self._registered.append(pages)
        return pages[: count * dtype.itemsize].view(dtype)

    @torch.no_grad()
    def onload(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Tensors, Callable[[], None]]:
        """Copies on the device, and a function: kernels that are launched after it is called see the values."""
        stream = self.stream
        if stream is None:
            return dict(tensors), lambda: None
        copies = {name: torch.empty_like(tensor, device=self.device) for name, tensor in tensors.items()}
        stream.wait_stream(torch.cuda.current_stream(self.device))  # their memory may still be in use there
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)
        return copies, lambda: torch.cuda.current_stream(self.device).wait_stream(stream)


def _unregister(registered: list[torch.Tensor]) -> None:
    for flat in registered:
        torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())
    registered.clear()
