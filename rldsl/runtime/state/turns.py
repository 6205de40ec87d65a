"""Who wrote each token of a conversation, as `plan/turns.py` stores it: those of the environment are ~id."""

from __future__ import annotations

import torch


def marked(tokens: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[T] int64: as they are stored. own: [T] bool, which tokens the model wrote."""
    return torch.where(own, tokens, ~tokens)


def unmarked(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of stored tokens [T], and which the model wrote [T]."""
    own = stored >= 0
    return torch.where(own, stored, ~stored), own
