"""What ends a completion besides the longest length: end tokens, and texts that the user gave."""

from __future__ import annotations

from functools import lru_cache
from os.path import commonprefix
from typing import Any

import torch

from rldsl.runtime.data.end_tokens import ends


class StopStrings:
    """Whether the last token of a completion completes one of the stop strings; it may have more text behind it."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any):
        self.stop, self.tokenizer = stop, tokenizer
        self.tail = max(len(text.encode()) for text in stop) + 8  # a token may be one byte of a character; 8 for others

    def hit(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """tokens [S, M], lengths [S] -> [S] bool."""
        at = lengths[:, None] + torch.arange(-self.tail, 0, device=tokens.device)
        some = torch.where(at >= 0, tokens.gather(1, at.clamp(min=0)), -1).tolist()
        tails = [[token for token in row if token >= 0] for row in some]
        before, after = (self.tokenizer.batch_decode(x, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                         for x in ([tail[:-1] for tail in tails], tails))
        return torch.tensor(list(map(self._completed, before, after)), dtype=torch.bool, device=tokens.device)

    def _completed(self, before: str, after: str) -> bool:
        """Whether a stop string ends in what the last token changed, which may be the character before it too."""
        same = len(commonprefix((before, after)))
        return any(after.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in self.stop)


@lru_cache(maxsize=4)
def tokenizer_of(directory: str) -> tuple[Any, list[int]]:
    """With the tokens that end a sequence."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return found, sorted(ends(directory, found))
