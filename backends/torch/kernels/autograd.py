"""Functions with a gradient of their own: torch's `autograd.Function`, with a typed `apply`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


class Function(torch.autograd.Function):
    """Derive from this class as from torch's."""

    if TYPE_CHECKING:  # torch declares it without types
        @classmethod
        def apply(cls, *args: Any) -> Any: ...
