"""Data sources: the rows of every step, tokenized.

In: a plan's Data record. Out: for each step the sequences of its frames, and the columns for Python functions.
Invariant: what a step reads is a function of the file, seed and step alone, equal on all ranks.

Batches: the rows of an epoch are permuted by (seed, epoch) when the source shuffles, else in file order; batch b of
the run is batch b of the endless sequence of epochs. Rows at the end of an epoch that do not fill a batch are dropped.
Code, besides those of the other files here: RL0748 fewer rows than a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rldsl.diag import Diagnostic, counted, fail, present
from rldsl.plan.model import ROLES, Data
from rldsl.runtime.data import hf, jsonl, parquet
from rldsl.runtime.data.image_processor import image_processor
from rldsl.runtime.data.image_prompts import ImagePrompts
from rldsl.runtime.data.images import ImageColumn, import_pillow
from rldsl.runtime.data.over_long_rows import filter_over_long
from rldsl.runtime.data.row_schema import SIDES, Row, RowNeeds, ScannedFile, Table
from rldsl.runtime.data.row_views import answer_rows, rows_of
from rldsl.runtime.data.tokens import Tokens, load_tokenizer
from rldsl.sharding.partition import mix

_BLOCK = 1 << 20  # rows that are hashed at once

SCANS: Mapping[str, Callable[[str, RowNeeds], ScannedFile]] = {
    "jsonl": jsonl.scan, "parquet": parquet.scan, "hf": hf.scan,
}
# kind -> frame (as named after the user's name: "" or ".chosen") -> the role of its responses. Rows with several
# answers are two frames: their prompts, and the answers of each
FRAMES: dict[str, dict[str, str | None]] = {
    "prompts": {"": None}, "answers": {"": "answer"}, "pairs": {"chosen": "chosen", "rejected": "rejected"},
}
SEVERAL: dict[str, str | None] = {"prompts": None, "": "answer"}


@dataclass(frozen=True, slots=True)
class FetchedFrame:
    """The rows of a frame as they were read."""

    prompt_lens: list[int]    # tokens of each row's prompt
    response_lens: list[int]  # tokens of each row's response
    tokens: list[Tensor]      # for each row an int64 tensor: the prompt, then the response (empty for a prompt alone)


class WholeRow(NamedTuple):
    """A row with all of its columns."""

    place: str   # of the row, for messages
    columns: Row
    number: int  # of the row in its source


@dataclass(frozen=True)
class Source:
    """An open data source. Steps count from 0."""

    data: Data      # its declaration in the plan
    table: Table    # its rows
    tokens: Tokens  # makes token ids of them
    passes: float   # how often the run goes over the rows
    note: str = ""  # a line about over-long rows, or ""
    warnings: tuple[Diagnostic, ...] = ()  # about its rows

    @property
    def tokenizer(self) -> Any:
        return self.tokens.tokenizer

    @property
    def image_column(self) -> ImageColumn:
        """Of a source with images."""
        return present(self.tokens.images, f"images of the data `{self.data.name}`", self.data.path).column

    @property
    def ends(self) -> frozenset[int]:
        return self.tokens.ends

    def step(self, step: int, seed: int) -> dict[str, FetchedFrame]:
        """The frames of one step, in the order of a fetch: "" for prompts and answers, "chosen" and "rejected" for
        pairs, "prompts" and "" for rows with several answers."""
        return self.read(self.batch(step, seed))

    def read(self, numbers: list[int]) -> dict[str, FetchedFrame]:
        """The frames of the rows with these numbers."""
        rows, several = self.table.read(numbers), self.data.answers or 1

        def place(i: int) -> str:
            return self.table.place(numbers[i])

        def place_of_answer(i: int) -> str:
            return place(i // several)

        prompts = [ids[-self.data.max_prompt_tokens :]  # [-0:] is all
                   for ids in self.tokens.prompts(rows, place, numbers)]
        frames = {}
        for name, role in (SEVERAL if self.data.answers else FRAMES[self.data.row_format]).items():
            limit = self.data.max_answer_tokens or None
            before = [ids for ids in prompts for _ in range(several)] if role else prompts
            answered = answer_rows(rows, self.tokens.roles["answer"]) if several > 1 else rows
            answers = [ids[:limit] for ids in self.tokens.answers(answered, role, place_of_answer)
                       ] if role else [[]] * len(rows)
            tokens = [torch.tensor(p + a, dtype=torch.int64) for p, a in zip(before, answers, strict=True)]
            frames[name] = FetchedFrame([len(p) for p in before], [len(a) for a in answers], tokens)
        return frames

    def whole(self, numbers: list[int]) -> list[WholeRow]:
        """All columns of the rows with these numbers."""
        return [WholeRow(self.table.place(n), row, n) for n, row in zip(numbers, self.table.read(numbers), strict=True)]

    def columns(self, step: int, seed: int) -> list[Row]:
        """All columns of the step's rows, in row order."""
        return self.table.read(self.batch(step, seed))

    def batch(self, step: int, seed: int) -> list[int]:
        """The row numbers of a step."""
        size = self.data.batch
        epoch, first = divmod(step, len(self.table) // size)
        if not self.data.shuffle:
            return list(range(first * size, (first + 1) * size))
        rows: list[int] = self._order(seed, epoch)[first * size : (first + 1) * size].tolist()
        return rows

    @functools.cached_property
    def _orders(self) -> dict[tuple[int, int], np.ndarray]:
        return {}

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if (seed, epoch) not in self._orders:
            self._orders.clear()  # only the current epoch is ever needed again
            self._orders[seed, epoch] = permutation(len(self.table), seed, epoch)
        return self._orders[seed, epoch]


def column_name(data: Data, role: str) -> str:
    """The declared name of the column that plays `role`."""
    return dict(data.columns).get(role, role)


def open_source(data: Data, steps_needed: int, speaks: bool = False, number: tuple[int, int] = (0, 1)) -> Source:
    """Check the file and load its tokenizer. Raises a Failure when either cannot be used. speaks: this rank informs the
    user of truncated rows. number: which of how many sources of the run it is, by which its images are numbered."""
    folder = Path(data.path) if Path(data.path).is_dir() else Path(data.path).parent
    needs = RowNeeds({role: column_name(data, role) for role in ROLES[data.row_format]}, data.numbers,
                     data.answers, data.images, folder)
    if data.images:
        import_pillow(data.path)
    scanned = SCANS[data.format](data.path, needs)
    table = rows_of(scanned)
    _enough(data, table, "")
    images = ImagePrompts(ImageColumn(data.images, folder, max(1, scanned.images_per_row), *number),
                          image_processor(data.tokenizer)) if data.images else None
    tokens = Tokens(load_tokenizer(data), data.tokenizer, scanned.roles, images)
    table, note = filter_over_long(data, table, tokens, speaks)
    if scanned.implicit_prompts:
        sides = " and ".join(f"`{scanned.roles[side]}`" for side in SIDES)
        rows = counted(scanned.implicit_prompts, "row")
        implicit = f"data {data.name}: the prompt of {rows} is what {sides} begin with"
        note = "; ".join(filter(None, (implicit, note)))
    _enough(data, table, note)
    return Source(data, table, tokens, steps_needed / (len(table) // data.batch), note, scanned.warnings)


def _enough(data: Data, table: Table, note: str) -> None:
    if len(table) < data.batch:
        raise fail("RL0748", f"this data has {counted(len(table), 'row')}, but a batch needs {data.batch}",
                   place=data.path, notes=(note,) if note else (),
                   help=f"add rows, or declare `batch={max(1, len(table))}` or less")


def permutation(n: int, *keys: int) -> np.ndarray:
    """0..n-1 (int64) in a pseudo-random order that depends on `keys` alone: that of `sharding.partition.permutation`,
    in 8 bytes per row."""
    hashes = np.empty(n, np.uint64)
    start = np.uint64(mix(mix(*keys)))
    for first in range(0, n, _BLOCK):
        hashes[first : first + _BLOCK] = _mix(start, np.arange(first, min(n, first + _BLOCK), dtype=np.uint64))
    return np.argsort(hashes)  # no two are equal: each step of the hash can be undone


def _mix(start: np.uint64, last: np.ndarray) -> np.ndarray:
    """`mix(key, i)` for many i; start: `mix(key)`."""
    state = (start ^ last) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)
