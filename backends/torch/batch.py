"""Packed sequences as a model sees them: tokens, positions, and where the fresh outputs are read.

The distribution of response token t comes from the hidden state one position before it, and so does the value of the
state in which it was chosen; a score comes from the hidden state at a sequence's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rldsl.backends.torch.attention import Varlen
from rldsl.diag import fail
from rldsl.runtime.backend import Packed
from rldsl.runtime.store import within


@dataclass(frozen=True, slots=True)
class Batch:
    """Several frames' sequences as one packed row of T tokens.

    before: [R] where the hidden states of response tokens are read; targets: [R] the tokens themselves; ends: [S] the
    last token of each sequence. responses, sequences: how many of them each frame has."""

    tokens: torch.Tensor
    packing: Varlen
    before: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor
    responses: tuple[int, ...]
    sequences: tuple[int, ...]


def batch(frames: Sequence[Packed], device: torch.device) -> Batch:
    """Errors: RL0732 for an empty prompt (nothing predicts its first response token)."""
    tokens = torch.cat([f.tokens for f in frames]).to(device)
    prompts = torch.cat([f.prompt_lens for f in frames]).to(device)
    responses = torch.cat([f.response_lens for f in frames]).to(device)
    if prompts.numel() and int(prompts.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    lengths = prompts + responses
    starts = lengths.cumsum(0) - lengths
    before = (starts + prompts - 1).repeat_interleave(responses) + within(responses)
    return Batch(tokens, Varlen(lengths), before, tokens[before + 1], starts + lengths - 1,
                 tuple(int(f.response_lens.sum()) for f in frames), tuple(len(f) for f in frames))
