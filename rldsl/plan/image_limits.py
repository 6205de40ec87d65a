"""How many tokens of images a prompt has, at most.

In: the data sources of a plan, or their limits. Out: tokens, which memory and time of vision towers follow from. A
frame may have rows of several sources (`concat`), so one number holds for all frames of a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rldsl.plan.model import Data


def most_image_tokens(sources: Iterable[Data]) -> int:
    """Of a row of any of these sources. 0: none has images."""
    return most_declared({"images": d.images, "max_prompt_tokens": d.max_prompt_tokens,
                          "max_image_tokens": d.max_image_tokens} for d in sources)


def most_declared(sources: Iterable[Mapping[str, Any]]) -> int:
    """As `most_image_tokens`, of the options of declarations. Without a limit of images that of the prompt holds: the
    compiler reads no rows."""
    return max((int(d.get("max_image_tokens") or d["max_prompt_tokens"]) for d in sources if d.get("images")),
               default=0)
