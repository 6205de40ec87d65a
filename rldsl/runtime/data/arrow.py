"""Rows in Arrow record batches: the common part of `parquet.py` and `hf.py`.

In: the files of a source, their batches, and what the program needs of a row. Out: a table of record batches in mapped
memory, which the operating system reads when asked for. pyarrow does the reading; it is imported here only.
Codes: RL0742 no rows, RL0743 not UTF-8, RL0752 changed during the run, RL0753 pyarrow is not installed, RL0754 not
such a file or damaged, RL0755 files with different columns, and those of `row_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from rldsl.diag import Diagnostic, Failure, fail
from rldsl.runtime.data.data_files import Stamp, file_changed, file_stamp, open_file
from rldsl.runtime.data.row_check import RowCheck
from rldsl.runtime.data.row_errors import missing
from rldsl.runtime.data.row_schema import Row, RowNeeds


@dataclass(frozen=True, slots=True)
class ArrowFile:
    """One file of a table."""

    path: str            # as the program names it
    rows: int            # how many it has
    stamp: Stamp | None  # shows whether the file has changed; None: the file is not read again


@dataclass(frozen=True, slots=True)
class ArrowTable:
    """The rows of one or more files, in record batches."""

    batches: tuple[Any, ...]      # pyarrow record batches, in order
    firsts: np.ndarray            # number of the first row of each batch, and of all rows at the end
    parts: tuple[ArrowFile, ...]  # the files, in order
    part_firsts: np.ndarray       # number of the first row of each file, and of all rows at the end

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def place(self, row: int) -> str:
        part = int(np.searchsorted(self.part_firsts, row, "right")) - 1
        return f"{self.parts[part].path}:{row - int(self.part_firsts[part]) + 1}"

    def read(self, rows: Sequence[int]) -> list[Row]:
        wanted, found = np.asarray(rows, np.int64), []
        if not len(wanted):
            return []
        for part in np.unique(np.searchsorted(self.part_firsts, wanted, "right") - 1):
            self._same(self.parts[part])
        at = np.searchsorted(self.firsts, wanted, "right") - 1
        breaks = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(at) != 0)) + 1
        for run, batch in zip(np.split(wanted, breaks), at[[0, *breaks]], strict=True):  # neighbors in one go
            try:
                found += self._read(int(batch), int(run[0]), len(run))
            except Failure:
                for row in run.tolist():  # name the row that cannot be read
                    self._read(int(batch), row, 1)
                raise
        return found

    def _read(self, batch: int, first: int, count: int) -> list[Row]:
        """Neighboring rows of one batch."""
        with readable(self.place(first), "row"):
            rows: list[Row] = self.batches[batch].slice(first - int(self.firsts[batch]), count).to_pylist()
        return rows

    def _same(self, part: ArrowFile) -> None:
        """RL0752 if a file has changed: reading mapped memory of a truncated file would end the process."""
        if part.stamp is not None:
            with open_file(part.path) as file:
                if file_stamp(file.fileno()) != part.stamp:
                    raise file_changed(part.path)


def import_arrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise fail("RL0753", "this data needs pyarrow, which is not installed", place=path,
                   help="run `pip install 'rldsl[parquet]'`, or save the rows as JSON lines and use `jsonl`") from None
    return pyarrow


@contextmanager
def readable(place: str, what: str) -> Iterator[None]:
    """RL0754 for what pyarrow says about a file that it cannot read."""
    import pyarrow as pa

    try:
        yield
    except Failure:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, NotImplementedError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        json = what != "row" and _starts_like_json(place)
        raise fail("RL0754", f"this {what} cannot be read", place=place, notes=(line,),
                   help="use `jsonl(...)` for JSON lines" if json else
                   "remove the row, or the column that holds this value" if isinstance(error, OverflowError) else
                   "write the file again") from None


def _starts_like_json(path: str) -> bool:
    with open_file(path) as file:
        head: bytes = file.read(64)
    return head.lstrip().startswith((b"{", b"["))


def one_schema(files: Sequence[str], schemas: Sequence[Any]) -> Any:
    """The schema that all files have. RL0755 names the first column in which one differs."""
    first = {f.name: f.type for f in schemas[0]}
    for file, schema in zip(files, schemas, strict=True):
        types_of_file = {f.name: f.type for f in schema}
        if len(types_of_file) != len(schema):
            twice = next(n for n in schema.names if schema.names.count(n) > 1)
            raise fail("RL0755", f"this file has two columns `{twice}`", place=file, help="rename one of them")
        for name in (*first, *types_of_file):
            if types_of_file.get(name) != first.get(name):
                both = ((files[0], first), (file, types_of_file))
                shown = tuple(f"{path}: `{name}` is {types.get(name, 'missing')}" for path, types in both)
                raise fail("RL0755", f"the files of this data have different types for the column `{name}`",
                           place=file, notes=shown,
                           help="all files must have the same columns and types")
    return schemas[0].remove_metadata()


def check_files(path: str, files: Sequence[str], schema: Any, needs: RowNeeds, batches: Callable[[str], Iterable[Any]],
                keep: Callable[[Any], None], stamped: bool) -> tuple[RowCheck, tuple[ArrowFile, ...]]:
    """Every row of every file, a batch at a time; each sound batch goes to `keep`. stamped: the files are read again
    during the run."""
    pa = import_arrow(path)
    check = RowCheck(needs.among(schema.names))
    _check_schema(pa, schema, check, files[0])
    check.errors.stop()
    names = list(dict.fromkeys((*check.needs.roles.values(), *check.needs.numbers,
                                *((needs.images,) if needs.images else ()))))
    names = [name for name in names if name in schema.names]  # without a prompt that rows may lack
    parts: list[ArrowFile] = []
    for file in files:
        with open_file(file) as opened:
            stamp = file_stamp(opened.fileno())
        rows = 0
        with readable(file, "file"):
            for batch in batches(file):
                _sound(pa, batch, file, rows)
                for number, row in enumerate(batch.select(names).to_pylist(), rows + 1):
                    check.row(row, file, number)
                others = [n for n in schema.names if n not in needs.numbers]
                check.errors.add(_not_finite(pa, batch, others, file, rows))
                keep(pa.RecordBatch.from_arrays([batch.column(n) for n in schema.names], schema=schema))
                rows += batch.num_rows
        parts.append(ArrowFile(file, rows, stamp if stamped else None))
    if not any(part.rows for part in parts):
        raise fail("RL0742", "this data has no rows", place=path, help="the file has no rows")
    check.errors.stop()
    return check, tuple(parts)


def table_of(batches: Sequence[Any], parts: tuple[ArrowFile, ...]) -> ArrowTable:
    full = tuple(b for b in batches if b.num_rows)
    return ArrowTable(full, _firsts([b.num_rows for b in full]), parts, _firsts([p.rows for p in parts]))


def _firsts(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _check_schema(pa: Any, schema: Any, check: RowCheck, file: str) -> None:
    """Report once what is wrong with whole columns."""
    types = {f.name: f.type for f in schema}
    if check.needs.images and check.needs.images not in types:
        check.errors.add([missing("images", check.needs.images, schema.names, file)])
    for role, name in [*check.needs.roles.items(), *(("", n) for n in check.needs.numbers)]:
        if name not in types:
            if role != "prompt" or not check.needs.implicit_prompts:
                check.errors.add([missing(role, name, schema.names, file)])
        elif role and not _may_hold(pa, types[name]):
            expected = "a string or a list of chat messages" if role == "prompt" else "a string or assistant messages"
            title = f"the column `{name}` is {types[name]}, not {expected}"
            check.errors.add([Diagnostic("RL0747", title, place=file)])


def _may_hold(pa: Any, kind: Any) -> bool:
    """Whether a column may hold the texts that are needed: it has texts, or lists, which are checked row by row."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = ("is_string", "is_large_string", "is_string_view", "is_list", "is_large_list", "is_null")
    return any(getattr(pa.types, test)(kind) for test in tests if hasattr(pa.types, test))


def _not_finite(pa: Any, batch: Any, names: Sequence[str], file: str, before: int) -> list[Diagnostic]:
    """RL0747 for the first row of each column that holds NaN or an infinity, which the rows of `jsonl` cannot hold
    either. names: the columns to look at. before: rows of the file before this batch."""
    found = []
    for name in names:
        column = batch.column(name)
        if not _has_floats(pa, column.type):
            continue
        if pa.types.is_floating(column.type):
            bad = np.flatnonzero(~np.isfinite(column.fill_null(0).to_numpy(zero_copy_only=False)))
            row = int(bad[0]) if len(bad) else None
        else:
            row = next((i for i, value in enumerate(column.to_pylist()) if not _finite(value)), None)
        if row is not None:
            found.append(Diagnostic("RL0747", f"the column `{name}` has a number that is not finite",
                                    place=f"{file}:{before + row + 1}",
                                    help="write null where there is no number, or remove the row"))
    return found


def _has_floats(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return _has_floats(pa, kind.value_type)
    return pa.types.is_floating(kind) or any(_has_floats(pa, kind.field(i).type) for i in range(kind.num_fields))


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, (list, tuple)):  # a map is a list of pairs
        return all(map(_finite, value))
    return not isinstance(value, float) or isfinite(value)


def _sound(pa: Any, batch: Any, file: str, before: int) -> None:
    """RL0743 and RL0754 for a batch whose bytes are not what its types say: to read it could crash the process."""
    try:
        batch.validate(full=True)
        return
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row in range(batch.num_rows):
            try:
                column.slice(row, 1).validate(full=True)
            except pa.ArrowInvalid as error:
                if "utf8" in str(error).lower():
                    raise fail("RL0743", f"the column `{name}` is not UTF-8", place=f"{file}:{before + row + 1}",
                               help="write the text as UTF-8") from None
    raise fail("RL0754", "this file is corrupted", place=file, notes=(reason,), help="write the file again")
