"""A sampled conversation as text: who said what, the calls of tools that are read in it, and what each turn earned.

In: the stored tokens of a row (`plan/turns.py`) and its tokenizer. Out: JSON values; no error, whatever a model writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from rldsl.plan.turns import STOPPED
from rldsl.runtime.data.tokens import Tokens
from rldsl.runtime.environments.tool_calls import TurnReader
from rldsl.runtime.image_tokens import ids_of
from rldsl.runtime.state.turns import unmarked

# by number; 0 is an end of its own accord, whether the environment or the model made it
REASONS = {number: name for name, number in reversed(STOPPED.items())}


def turns_of(stored: torch.Tensor, tokens: Tokens, rewards: Sequence[float]) -> list[dict[str, Any]]:
    """What was said after the prompt, in order: {"role": "assistant", "content", "calls", "reward"} of each turn of the
    model, and {"role": "environment", "content"} of what answers it, with what the chat template writes around it.

    stored: [T]. rewards: of the turns; [] if they are not known. `calls` is missing where there are none."""
    reader = TurnReader(tokens.tokenizer, tokens.directory, ())
    ids, own = unmarked(stored)
    found: list[dict[str, Any]] = []
    context: list[int] = []
    number = 0
    for is_own, pairs in groupby(zip(ids_of(ids).tolist(), own.tolist(), strict=True), key=lambda pair: pair[1]):
        piece = [i for i, _ in pairs]
        text = str(tokens.tokenizer.decode(piece, skip_special_tokens=True))
        if is_own:
            calls = [_plain(call) for call in reader.with_calls(piece, context).calls]
            turn = {"role": "assistant", "content": text} | ({"calls": calls} if calls else {})
            found.append(turn | ({"reward": rewards[number]} if number < len(rewards) else {}))
            number += 1
        elif found:
            found.append({"role": "environment", "content": text})
        context += piece
    return found


def _plain(value: Any) -> Any:
    """What a model wrote as JSON, without what JSON files do not have: NaN, infinities and halves of characters."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
