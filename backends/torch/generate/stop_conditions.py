"""What ends a completion before its maximum length: end-of-sequence tokens, and the user's stop strings."""

from __future__ import annotations

from functools import lru_cache
from os.path import commonprefix
from typing import Any

import torch

from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.data.tokens import end_tokens


class StopStrings:
    """Whether the last token of a completion completes a stop string; the token may have more text after it."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any):
        self.stop, self.tokenizer = stop, tokenizer
        # tokens that are decoded: one may be a single byte of a character; 8 more for tokens without text
        self.tail = max(len(text.encode()) for text in stop) + 8
        self.before: torch.Tensor | None = None  # [N, tail] int64: the last tokens of earlier calls, -1 for none

    def after(self, sequences: PackedBatch, sampled: torch.Tensor) -> StopStrings:
        """These strings for responses of which earlier calls sampled some tokens, which end the sequences ([N] of each
        response)."""
        found = StopStrings(self.stop, self.tokenizer)
        back = torch.arange(-self.tail, 0, device=sampled.device)
        ends = sequences.prompt_lens.cumsum(0)
        if len(sampled):
            found.before = torch.where(back >= -sampled[:, None],
                                       sequences.tokens[(ends[:, None] + back).clamp(min=0)], -1)
        return found

    def hit(self, tokens: torch.Tensor, lengths: torch.Tensor, seq_id: torch.Tensor | None = None) -> torch.Tensor:
        """tokens: [S, M] int64 sampled so far; lengths: [S] of them -> [S] bool. seq_id: [S], the sequences, where
        earlier calls sampled a part."""
        if self.before is not None and seq_id is not None:
            tokens, lengths = torch.cat([self.before[seq_id], tokens], 1), lengths + self.tail
        at = lengths[:, None] + torch.arange(-self.tail, 0, device=tokens.device)
        last = torch.where(at >= 0, tokens.gather(1, at.clamp(min=0)), -1).tolist()
        tails = [[token for token in row if token >= 0] for row in last]
        before, after = (self.tokenizer.batch_decode(x, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                         for x in ([tail[:-1] for tail in tails], tails))
        return torch.tensor(list(map(self._completes, before, after)), dtype=torch.bool, device=tokens.device)

    def _completes(self, before: str, after: str) -> bool:
        """Whether a stop string ends in the text that the last token changed. That may include the character before it,
        which its bytes may have completed."""
        same = len(commonprefix((before, after)))
        return any(after.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in self.stop)


@lru_cache(maxsize=4)
def tokenizer_of(directory: str) -> tuple[Any, list[int]]:
    """The tokenizer of a model directory, and the ids of the tokens that end a sequence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return tokenizer, sorted(end_tokens(directory, tokenizer))
