"""Which image a token stands for. It is part of the token, so that it goes wherever a row goes: between ranks, into
buffers, selections and checkpoints.

In: ids of tokens, numbers of images. Out: stored tokens: an image token has its id in the low 32 bits and the number of
its image, plus 1, above them; any other token is its id. All tokens of one image have the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SHIFT = 32
IDS = (1 << SHIFT) - 1


def image_token(token: int, image: int) -> int:
    """token: the id. image: the number of its image, at least 0."""
    return token | image + 1 << SHIFT


def is_image(token: int) -> bool:
    """Whether a stored token is one of an image."""
    return token >> SHIFT > 0


def ids_of(stored: torch.Tensor) -> torch.Tensor:
    """[T] int64: the ids."""
    return stored & IDS


def image_of(stored: torch.Tensor) -> torch.Tensor:
    """[T] int64: the number of the image of each token; -1 of any other token."""
    return (stored >> SHIFT) - 1


def beginning(stored: Sequence[int], most: int) -> Sequence[int]:
    """The first tokens, at most `most`, without a part of an image."""
    while 0 < most < len(stored) and stored[most] >> SHIFT and stored[most] == stored[most - 1]:
        most -= 1
    return stored[:most]


def plain_ids(stored: Sequence[int]) -> list[int]:
    """The ids."""
    return [token & IDS for token in stored]
