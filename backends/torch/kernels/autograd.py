"""Functions with their own gradient: torch's `autograd.Function`, with a typed `apply`; and what they compute
without the modes around a model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch


class Function(torch.autograd.Function):
    """Derive from this class as from torch's."""

    if TYPE_CHECKING:  # torch declares it without types
        @classmethod
        def apply(cls, *args: Any) -> Any: ...


def outside_modes() -> AbstractContextManager[None]:
    """Inside it, torch's functions are torch's own, whatever modes replace them, as in a backward pass; each takes a
    third of the time. For functions that call all that must be replaced by its name."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled
