"""Prompts that users' Python functions write, as token ids.

In: for each row a string, a list of chat messages or None, and the tokenizer of the model that generates from them.
Out: for each row its ids; none for a row that is missing. They are a function of the text and the tokenizer alone.
Codes: RL0789 a prompt is too long, and those of `tokens.py` with the row in place of a line of data.
"""

from __future__ import annotations

from collections.abc import Sequence

from rldsl.diag import fail
from rldsl.plan.derive_ops import OverLong
from rldsl.plan.function import Function, Text
from rldsl.runtime.data.tokens import Tokens


def prompt_ids(tokens: Tokens, function: Function, texts: Sequence[Text | None], names: Sequence[str], most: int,
               over_long: OverLong) -> list[list[int]]:
    """The ids of each prompt, at most `most` of them; [] for None, and for a prompt that is dropped. Of a truncated one
    the end stays, as in rows of data. names: what messages call the rows."""
    there = [i for i, text in enumerate(texts) if text is not None]
    found = tokens.prompts([{"prompt": texts[i]} for i in there], lambda k: _place(function, names[there[k]]))
    ids: list[list[int]] = [[] for _ in texts]
    for i, row in zip(there, found, strict=True):
        if len(row) > most and over_long == "error":
            raise fail("RL0789", f"`{function.name}` returned a prompt of {len(row):,} tokens for row {names[i]}, but "
                       f"max_tokens={most}", place=function.path,
                       help=f"write a shorter prompt, raise `max_tokens` of `-> {function.returns}(...)`, or declare "
                            "`over_long=truncate`, or `over_long=drop` if no call takes these prompts as `prompt=`, "
                            "which needs one for each response")
        ids[i] = row[-most:] if len(row) <= most or over_long == "truncate" else []
    return ids


def _place(function: Function, row: str) -> str:
    return f"{function.path}, `{function.name}` for row {row}"
