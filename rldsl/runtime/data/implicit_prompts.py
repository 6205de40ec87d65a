"""Pairs whose prompt is what both sides begin with, as datasets for preference training often have them.

In: a row of pairs. Out: the row with a prompt, and sides without it. It is what `extract_prompt` of TRL 1.16 makes of a
row: the longest beginning that both sides share, counted in messages of a chat or in characters of a text. A space at
its end belongs to the answers. Where one side is the beginning of the other, its last message or character is its
answer. A row from which nothing sensible comes stays as it is, and is checked as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rldsl.runtime.data.chat_messages import without_nulls
from rldsl.runtime.data.row_schema import Row, Table


def with_implicit_prompt(row: Row, roles: Mapping[str, str]) -> Row:
    """The row with its prompt, if it has none, or a text while both sides are chats, which then begin with it; the same
    row otherwise. roles: as in `RowNeeds`, of pairs."""
    names = [roles[role] for role in ("prompt", "chosen", "rejected")]
    prompt, chosen, rejected = map(row.get, names)
    chats = _is_chat(chosen) and _is_chat(rejected)
    if not chats and not (type(chosen) is type(rejected) is str) or names[0] in row and not (
            chats and isinstance(prompt, str)):
        return row
    count = _shared(chosen, rejected)
    parts = (chosen[:count], chosen[count:], rejected[count:])  # type: ignore[index]  # lists or texts
    return {**row, **dict(zip(names, parts, strict=True))} if all(parts) else row


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _shared(chosen: Any, rejected: Any) -> int:
    """How many messages or characters both begin with."""
    shorter = min(len(chosen), len(rejected))
    for i in range(shorter):
        if not same_answers(chosen[i], rejected[i]):
            return i - 1 if i and chosen[i - 1] == " " else i
    return max(0, shorter - 1)


def same_answers(a: Any, b: Any) -> bool:
    """Whether two answers, or messages or characters of them, are the same."""
    return bool(a == b) or not isinstance(a, str) and without_nulls(a) == without_nulls(b)


@dataclass(frozen=True, slots=True)
class ImplicitPromptRows:
    """The rows of a table, with prompts."""

    table: Table              # the rows of the file
    roles: Mapping[str, str]  # as in `RowNeeds`

    def __len__(self) -> int:
        return len(self.table)

    def place(self, row: int) -> str:
        return self.table.place(row)

    def read(self, rows: Sequence[int]) -> list[Row]:
        return [with_implicit_prompt(row, self.roles) for row in self.table.read(rows)]
