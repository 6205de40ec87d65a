"""JSON-lines files: one object per line, checked once, read by row afterwards.

In: a path and what the program needs of a row. Out: a table of byte offsets, 8 bytes per row; rows are read when asked
for, so the file is never in memory. Blank lines are skipped; a byte-order mark is allowed.
Codes: RL0742 no rows, RL0743 not UTF-8, RL0744 not JSON, RL0745 not an object, RL0752 changed during the run, RL0754
another format, and those of `row_check.py`.
"""

from __future__ import annotations

import codecs
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rldsl.diag import Diagnostic, fail
from rldsl.plan.disk_paths import shown
from rldsl.runtime.data.data_files import Stamp, file_changed, file_stamp, read_file, refuse_other_format
from rldsl.runtime.data.row_check import RowCheck
from rldsl.runtime.data.row_schema import Row, RowNeeds, ScannedFile, kind_of

BLOCK = 1 << 20  # bytes read at once


class NotJson(ValueError):
    """What Python's reader accepts although JSON does not have it, or what would be lost in a dict."""


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NotJson(f"the key {shown(repr(twice))} occurs twice")
    return row


def _constant(name: str) -> float:
    raise NotJson(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_constant)
SHAPE = "each line must be a JSON object such as {\"prompt\": \"2+2=\"}"


@dataclass(frozen=True, slots=True)
class JsonLines:
    """The rows of a file with one JSON object per line."""

    path: str            # of the file
    offsets: array[int]  # byte at which each row starts
    blanks: array[int]   # for each blank line, the number of rows before it
    stamp: Stamp         # shows whether the file has changed

    def __len__(self) -> int:
        return len(self.offsets)

    def place(self, row: int) -> str:
        return f"{self.path}:{row + 1 + bisect_right(self.blanks, row)}"

    def read(self, rows: Sequence[int]) -> list[Row]:
        with read_file(self.path) as file:
            if file_stamp(file.fileno()) != self.stamp:
                raise file_changed(self.path)
            found = []
            for row in rows:
                file.seek(self.offsets[row])
                found.append(json.loads(_text(file.readline())))
        return found


def scan(path: str, needs: RowNeeds) -> ScannedFile:
    """Read and check the whole file once, in blocks. Raises a Failure with the first errors, each with its line, and
    the number of the others."""
    offsets, blanks = array("q"), array("q")
    check: RowCheck | None = None
    with read_file(path) as file:
        stamp = file_stamp(file.fileno())
        refuse_other_format(file, path, "JSON lines")
        number = 0
        for block, starts in _blocks(file):
            lines = block.split(b"\n")
            escapes = b"\\ud" in block or b"\\uD" in block
            full = np.ones(len(starts), bool)
            for i, raw in enumerate(lines[: len(starts)]):
                number += 1
                if not raw or raw.isspace():
                    full[i] = False
                    blanks.append(number - 1 - len(blanks))
                    continue
                row = _plain(raw) or parse(raw, f"{path}:{number}")
                if check is None:
                    check = RowCheck(needs.among(row) if isinstance(row, dict) else needs)
                if isinstance(row, dict):
                    check.row(row, path, number, escapes)
                else:
                    check.errors.add([row])
            offsets.frombytes(starts[full].tobytes())
    if check is None:
        raise fail("RL0742", "this data file is empty", place=path, help="write one JSON object per line")
    return check.finish(JsonLines(path, offsets, blanks, stamp))


def _blocks(file: Any) -> Iterator[tuple[bytes, np.ndarray]]:
    """Whole lines, many at once, and the offsets at which they start in the file (int64)."""
    offset = 0
    while block := file.read(BLOCK):
        block += file.readline()
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        starts = np.concatenate([[0], ends + 1]).astype(np.int64) + offset
        yield block, starts[: -1 if block.endswith(b"\n") else None]
        offset += len(block)


def _plain(raw: bytes) -> Row | None:
    """The object in a line, by a quick check that most lines pass; None if the line needs the full one."""
    try:
        text = raw.decode()
        row, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return row if end == len(text) and isinstance(row, dict) else None


def parse(raw: bytes, place: str) -> Row | Diagnostic:
    """One line as an object, or what is wrong with it."""
    try:
        row = _DECODER.decode(_text(raw))
    except UnicodeDecodeError as error:
        return Diagnostic("RL0743", f"byte {error.start + 1} of this line is not UTF-8", place=place,
                          help=_format(raw) or "save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        where = f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}" if isinstance(
            error, json.JSONDecodeError) else "it is nested too deeply" if isinstance(
            error, RecursionError) else str(error) if isinstance(error, NotJson) else "an integer has too many digits"
        return Diagnostic("RL0744", f"this line is not valid JSON: {where}", place=place, help=_format(raw) or SHAPE)
    if not isinstance(row, dict):
        return Diagnostic("RL0745", f"this line is {kind_of(row)}, not an object", place=place,
                          help=_format(raw) or SHAPE)
    return row


def _format(raw: bytes) -> str:
    """Advice if a file looks like another format."""
    if raw.lstrip().startswith(b"["):
        return f"{SHAPE}; to convert a JSON list, run `jq -c '.[]'`"
    return ""


def _text(raw: bytes) -> str:
    return raw.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n").decode()
