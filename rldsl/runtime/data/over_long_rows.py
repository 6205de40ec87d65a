"""Rows with more tokens than the data declaration allows.

In: a table, its tokens and `over_long` of the declaration. Out: the rows of the run, and a line about them. Rows are
tokenized a few at a time. Code: RL0756 a row is too long.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from rldsl.diag import Diagnostic
from rldsl.plan.model import Data
from rldsl.runtime.data.row_check import RowErrors
from rldsl.runtime.data.row_schema import Row, Table
from rldsl.runtime.data.row_views import KeptRows, answer_rows
from rldsl.runtime.data.tokens import RowLocation, Tokens
from rldsl.runtime.image_tokens import is_image

AT_ONCE = 256  # rows
IMAGES = "images"  # next to the roles of columns: the tokens of a prompt's images
MAX_COUNTED_ROWS = 4096  # in a longer file, as many rows drawn at random are counted


def filter_over_long(data: Data, table: Table, tokens: Tokens, speaks: bool) -> tuple[Table, str]:
    """The rows of the run, and what to tell the user ("": nothing). Which rows are dropped is a function of the file,
    the tokenizer and the limits. speaks: whether to count the truncated rows; in a long file, those among
    `MAX_COUNTED_ROWS`."""
    if data.over_long == "truncate":
        return table, _truncated(data, table, tokens) if speaks else ""
    errors, kept = RowErrors(), array("q")
    for row, excess in _excess(data, table, tokens, range(len(table))):
        if not excess:
            kept.append(row)
        elif data.over_long == "error":
            errors.add([Diagnostic("RL0756", f"this row is too long: {excess}", place=table.place(row),
                                   help="raise the limit, shorten the row, or declare `over_long=drop`" +
                                        ("; smaller images have fewer tokens" if data.images else " or `truncate`"))])
    errors.stop()
    dropped = len(table) - len(kept)
    if not dropped:
        return table, ""
    return KeptRows(table, np.frombuffer(kept, np.int64) if kept else np.empty(0, np.int64)), (
        f"data {data.name}: {dropped} of {len(table)} rows dropped because they are longer than {_limits(data)}")


def _truncated(data: Data, table: Table, tokens: Tokens) -> str:
    counted: Sequence[int] = range(len(table))
    if len(table) > MAX_COUNTED_ROWS:
        counted = sorted(Random(0).sample(counted, MAX_COUNTED_ROWS))
    count = sum(bool(excess) for _, excess in _excess(data, table, tokens, counted))
    of = f"{len(table)} rows" if len(counted) == len(table) else f"the {len(counted)} rows checked"
    return f"data {data.name}: {count} of {of} truncated to {_limits(data)}" if count else ""


def _limits(data: Data) -> str:
    answers = f" or max_answer_tokens={data.max_answer_tokens}" if data.max_answer_tokens else ""
    images = f" or max_image_tokens={data.max_image_tokens}" if data.max_image_tokens else ""
    return f"max_prompt_tokens={data.max_prompt_tokens}{images}{answers}"


def _excess(data: Data, table: Table, tokens: Tokens, rows: Sequence[int]) -> Iterator[tuple[int, str]]:
    """For each row, what of it is too long."""
    columns = {**tokens.roles, IMAGES: data.images}
    for first in range(0, len(rows), AT_ONCE):
        numbers = list(rows[first : first + AT_ONCE])
        read = table.read(numbers)

        def place(i: int, numbers: Sequence[int] = numbers) -> str:
            return table.place(numbers[i])

        prompts = tokens.prompts(read, place)
        lengths = {"prompt": [len(ids) for ids in prompts]}
        if data.max_image_tokens:
            lengths[IMAGES] = [sum(map(is_image, ids)) for ids in prompts]
        for role in tokens.roles:
            if role != "prompt":
                lengths[role] = longest_answers(data, read, role, tokens, place)
        for i, row in enumerate(numbers):
            yield row, "; ".join(_says(data, columns[role], role, found[i]) for role, found in lengths.items()
                                 if 0 < _limit(data, role) < found[i])


def longest_answers(data: Data, rows: Sequence[Row], role: str, tokens: Tokens, place: RowLocation) -> list[int]:
    """Tokens of the answer of each row, or of the longest of its answers."""
    each = data.answers or 1
    if data.answers:
        rows = answer_rows(rows, tokens.roles[role])
    found = [len(ids) for ids in tokens.answers(rows, role, lambda i: place(i // each))]
    return [max(found[i : i + each]) for i in range(0, len(found), each)]


def _limit(data: Data, role: str) -> int:
    return int(getattr(data, _option(role)))


def _says(data: Data, column: str, role: str, count: int) -> str:
    return f"`{column}` has {count} tokens, but {_option(role)}={_limit(data, role)}"


def _option(role: str) -> str:
    return {"prompt": "max_prompt_tokens", IMAGES: "max_image_tokens"}.get(role, "max_answer_tokens")
