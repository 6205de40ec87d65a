"""Frames by hand, with their spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rldsl.plan.model import Frame, Space
from rldsl.plan.spaces import IndexedFrame, indexed


def frame(id: str, rows: str, prompts: str, count: int, per_prompt: int = 1, data: str = "d", prompt_tokens: int = 8,
          response_tokens: int = 8, *, below: IndexedFrame | None = None, of: IndexedFrame | None = None,
          iterations: int = 1, known: Sequence[IndexedFrame] = (), **more: Any) -> IndexedFrame:
    """A frame over the space `rows`, whose parent is `prompts` unless that is the same. below: a frame whose rows are
    the prompts. of: the frame that it is a selection of, with a chain as long. known: more frames whose spaces its own
    lead to. more: other fields of the frame."""
    spaces = {s.id: s for f in (below, of, *known) if f is not None for s in f.chain}
    selected = [s.id for s in of.chain] if of is not None else ["", ""]
    if rows == prompts:
        spaces[rows] = Space(rows, count, of=selected[0], iterations=iterations)
    else:
        spaces[rows] = Space(rows, count, prompts, per_prompt, selected[0])
        if below is None:
            spaces[prompts] = Space(prompts, count // per_prompt, of=selected[1], iterations=iterations)
    return indexed(Frame(id, rows, data, prompt_tokens, response_tokens, **more), spaces)


def resized(f: IndexedFrame, count: int, per_prompt: int, prompt_tokens: int, response_tokens: int) -> IndexedFrame:
    """The frame with other numbers of rows and tokens."""
    return frame(f.id, f.row_space, f.prompt_space, count, per_prompt, f.data, prompt_tokens, response_tokens)
