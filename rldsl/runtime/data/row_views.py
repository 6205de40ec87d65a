"""Rows made of the rows of a table: the pairs of a row with many answers, and the rows that are kept.

In: a table and numbers. Out: a table. Both hold at most 8 bytes per row, and no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rldsl.runtime.data.row_schema import SIDES, Row, ScannedFile, Table, several


@dataclass(frozen=True, slots=True)
class PairRows:
    """Row i of a file with k positive and k negative answers is k rows, one after another: the first answers of both
    sides, the second ones, and so on."""

    table: Table              # the rows of the file
    roles: Mapping[str, str]  # as in `RowNeeds`
    firsts: np.ndarray        # number of the first pair of each row, and of all pairs at the end

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def place(self, row: int) -> str:
        return self.table.place(self._at(row)[0])

    def read(self, rows: Sequence[int]) -> list[Row]:
        at = [self._at(row) for row in rows]
        whole = self.table.read([i for i, _ in at])
        return [self._pair(row, which) for row, (_, which) in zip(whole, at, strict=True)]

    def _at(self, row: int) -> tuple[int, int]:
        table_row = int(np.searchsorted(self.firsts, row, "right")) - 1
        return table_row, row - int(self.firsts[table_row])

    def _pair(self, row: Row, which: int) -> Row:
        names = [self.roles[side] for side in SIDES]
        return {**row, **{name: row[name][which] for name in names if several(row[name])}}


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Some rows of a table."""

    table: Table      # all rows
    rows: np.ndarray  # numbers of those that are kept, ascending

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, row: int) -> str:
        return self.table.place(int(self.rows[row]))

    def read(self, rows: Sequence[int]) -> list[Row]:
        return self.table.read([int(self.rows[row]) for row in rows])


def answer_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows with several answers as rows with one: those of the first row, then those of the next."""
    return [{**row, column: answer} for row in rows for answer in row[column]]


def numbers_of(rows: Sequence[Row], column: str, answers: int) -> list[float]:
    """A number column of rows: one number of each, or with several answers one of each answer."""
    if not answers:
        return [float(row[column]) for row in rows]
    values = (row[column] if isinstance(row[column], list) else [row[column]] * answers for row in rows)
    return [float(number) for of_row in values for number in of_row]


def rows_of(scanned: ScannedFile) -> Table:
    """The rows of a run."""
    if scanned.counts is None:
        return scanned.table
    counts = np.frombuffer(scanned.counts, np.uint32)
    firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    return PairRows(scanned.table, scanned.roles, firsts)
