"""Packed sequences as a model sees them: tokens, positions, and where the fresh outputs are read.

The distribution of response token t comes from the hidden state one position before it, and so does the value of the
state in which it was chosen; a score comes from the hidden state at a sequence's last token. With context parallelism
a rank sees its part of the row, reads there, and joins what all ranks have read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rldsl.backends.torch.model.attention import Varlen
from rldsl.backends.torch.model.context_parallel import Context, Portion
from rldsl.backends.torch.model.sequence_parallel import Filled, Tokens, fill

from rldsl.diag import fail
from rldsl.runtime.backend import Axis, PackedBatch
from rldsl.runtime.store import offsets_within


@dataclass(frozen=True, slots=True)
class Batch:
    """Several frames' sequences as one packed row of T tokens.

    before: [R] where the hidden states of response tokens are read; targets: [R] the tokens themselves; ends: [S] the
    last token of each sequence. responses, sequences: how many of them each frame has. over: with context parallelism,
    how the items of `before` and those of `ends` are divided; all of the above is then this rank's part."""

    tokens: torch.Tensor
    packing: Varlen | Context | Filled
    before: torch.Tensor
    targets: torch.Tensor
    ends: torch.Tensor
    responses: tuple[int, ...]
    sequences: tuple[int, ...]
    over: tuple[Portion, Portion] | None = None

    def whole(self, x: torch.Tensor, ends: bool = False) -> torch.Tensor:
        """What was read at `before`, or at `ends`, of all ranks."""
        return x if self.over is None else self.over[ends].join(x)


def batch(frames: Sequence[PackedBatch], device: torch.device, cp: Axis, tokens: Tokens) -> Batch:
    """What this rank of a cp group has of some frames; with sequence parallelism, filled up.
    Errors: RL0732 for an empty prompt."""
    part = _part(frames, device, cp)
    count = len(part.tokens)
    rows = tokens.rows(count)
    return part if rows == count else replace(part, tokens=fill(part.tokens, rows), packing=Filled(part.packing, rows))


def _part(frames: Sequence[PackedBatch], device: torch.device, cp: Axis) -> Batch:
    """Errors: RL0732 for an empty prompt (nothing predicts its first response token)."""
    tokens = torch.cat([f.tokens for f in frames]).to(device)
    prompts = torch.cat([f.prompt_lens for f in frames]).to(device)
    responses = torch.cat([f.response_lens for f in frames]).to(device)
    if prompts.numel() and int(prompts.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    lengths = prompts + responses
    starts = lengths.cumsum(0) - lengths
    before = (starts + prompts - 1).repeat_interleave(responses) + offsets_within(responses)
    targets, ends = tokens[before + 1], starts + lengths - 1
    sizes = tuple(int(f.response_lens.sum()) for f in frames), tuple(len(f) for f in frames)
    if cp.size == 1:
        return Batch(tokens, Varlen(lengths), before, targets, ends, *sizes)
    packing = Context(lengths, cp)
    local, over = packing.tokens.local, tuple(Portion.of(packing.owner[at], cp) for at in (before, ends))
    return Batch(packing.tokens.fill(tokens[packing.tokens.mine]), packing, local[before[over[0].mine]],
                 targets[over[0].mine], local[ends[over[1].mine]], *sizes, over)
