"""Numbers of the host on the device, without a wait.

A plain copy from memory that is not pinned makes the host wait until the device has done all that was launched before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(numbers: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """[n]: the numbers as a tensor. On CUDA the copy is under way when this returns; whatever is launched on the
    current stream afterwards sees it."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
