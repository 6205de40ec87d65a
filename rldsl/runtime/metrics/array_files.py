"""Histograms and tables of each step as files: OUT/histograms.jsonl, and OUT/tables/NAME.jsonl.

In: the numbers that the log has of them (`plan/arrays.py`). Out: lines, and for trackers what the lines hold. A
histogram's line has all histograms of a step, by name: {low, high, counts, below, above, nan}. A table has a line for
each row: {step, row, prompt, completion, COLUMN: number}. Only the rank that logs has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rldsl.plan.arrays import HISTOGRAM, ROWS, Array, Histogram, arrays, histogram, table_rows
from rldsl.plan.events import split_buffer
from rldsl.plan.metrics_file import HISTOGRAMS, TABLES
from rldsl.plan.projection import event_paths
from rldsl.runtime.files import check_writable
from rldsl.runtime.metrics.json_lines import LineFiles
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.data_reader import DataReader

Lines = dict[str, list[dict[str, Any]]]  # table -> its lines


class ArrayFiles:
    """The histograms and tables that a program logs. Everything that can be refused is refused when it is made."""

    def __init__(self, context: RunContext, data: DataReader):
        made = arrays(context.plan.programs)
        logged = {name: split_buffer(buffer)[0] for e, _ in event_paths(context.plan) for name, buffer in e.logged}
        self._arrays: dict[str, Array] = {name: made[value] for name, value in logged.items() if value in made}
        self._out, self._files = context.out, LineFiles()
        self._tokenizers = {name: data.tokens(context.frames[a.frame]).tokenizer
                            for name, a in self._arrays.items() if a.op == ROWS}
        if any(a.op == HISTOGRAM for a in self._arrays.values()):
            check_writable(self._out / HISTOGRAMS)
        for name in self._tokenizers:
            check_writable(self._table(name))

    def write(self, step: int, found: Mapping[str, Sequence[float]]) -> tuple[dict[str, Histogram], Lines]:
        """Write what a step logged, and return it. found: metric -> numbers."""
        histograms = {name: histogram(numbers) for name, numbers in found.items()
                      if self._arrays[name].op == HISTOGRAM}
        tables = {name: self._lines(step, name, found) for name in self._tokenizers if name in found}
        if histograms:
            line = {"step": step} | {name: asdict(h) for name, h in histograms.items()}
            self._files.append(self._out / HISTOGRAMS, step, [line])
        for name, lines in tables.items():
            self._files.append(self._table(name), step, lines)
        return histograms, tables

    def _lines(self, step: int, name: str, found: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
        tokenizer = self._tokenizers[name]
        columns = {a.column: found[n] for n, a in self._arrays.items() if a.table == name and a.op != ROWS}
        return [{"step": step, "row": row.number,
                 "prompt": tokenizer.decode(list(row.prompt), skip_special_tokens=True),
                 "completion": tokenizer.decode(list(row.response), skip_special_tokens=True),
                 **{column: numbers[i] for column, numbers in columns.items()}}
                for i, row in enumerate(table_rows(found[name], self._arrays[name].rows))]

    def _table(self, name: str) -> Path:
        return self._out / TABLES / f"{name}.jsonl"
