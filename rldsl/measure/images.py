"""Images of no run, to time a vision tower with.

In: a model's directory, whose image processor makes the numbers of a gray picture. Out: what a shard asks of the images
of a run (`rldsl.runtime.backend.Images`), and prompts that have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.data.image_processor import ImageProcessor, image_processor
from rldsl.runtime.image_tokens import image_token

SIDE = 448  # pixels of a picture's sides: about 256 tokens of a published Qwen2.5-VL


@dataclass(frozen=True)
class GrayImages:
    """Of one model. Every number is the number of an image, and all are alike."""

    directory: str  # of the model

    @property
    def processor(self) -> ImageProcessor:
        return image_processor(self.directory)

    @cached_property
    def tokens(self) -> int:
        """Of an image."""
        return self.processor.count((SIDE, SIDE))

    @cached_property
    def _inputs(self) -> Mapping[str, torch.Tensor]:
        from PIL import Image

        return self.processor.inputs([Image.new("RGB", (SIDE, SIDE), (127, 127, 127))])

    def grid(self, number: int) -> tuple[int, int] | None:
        return self.processor.grid((SIDE, SIDE))

    def inputs(self, numbers: Sequence[int]) -> Mapping[str, torch.Tensor]:
        return {name: torch.cat([x] * len(numbers)) for name, x in self._inputs.items()}

    def prompts(self, count: int, device: torch.device, shown: bool) -> PackedBatch:
        """`count` prompts of one image each, and a response of one token. shown: without it, other tokens are in
        their place, so that nothing but the tower is left out."""
        token = self.processor.token_id
        ids = [[image_token(token, number) if shown else 0] * self.tokens + [0] * 2 for number in range(count)]
        full = torch.full((count,), 1, dtype=torch.int64, device=device)
        return PackedBatch(torch.arange(count, device=device), full * (self.tokens + 1), full,
                           torch.tensor(ids, dtype=torch.int64, device=device).flatten())
