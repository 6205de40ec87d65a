"""JSON-lines files: one object a line, checked once, read by row afterwards.

In: a path and the columns that the program needs. Out: a `Table` of byte offsets; rows are read when asked for, so
the file is never in memory. Blank lines are skipped; a byte-order mark is allowed.
Codes: RL0741 cannot be opened, RL0742 no rows, RL0743 not UTF-8, RL0744 not JSON, RL0745 not an object,
RL0746 missing column, RL0747 wrong type, RL0749 empty prompt, RL0752 changed during the run.
"""

from __future__ import annotations

import codecs
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rldsl.diag import Diagnostic, Failure, fail

Row = dict[str, Any]
LARGEST = 3.4e38  # a float32
SHOWN = 5  # errors in full; the others are counted


@dataclass(frozen=True, slots=True)
class Table:
    """offsets, lines: where each row starts, and its line number from 1. stamp: size and time of the file."""

    path: str
    offsets: array[int]
    lines: array[int]
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return len(self.offsets)

    def place(self, row: int) -> str:
        return f"{self.path}:{self.lines[row]}"

    def read(self, rows: list[int]) -> list[Row]:
        """Some rows, in the order asked for. Fails when the file is no longer the one that was checked."""
        with _open(self.path) as file:
            if _stamp(file.fileno()) != self.stamp:
                raise fail("RL0752", "this data file changed during the run", place=self.path,
                           help="leave it alone while a run reads it; then start again")
            found = []
            for row in rows:
                file.seek(self.offsets[row])
                found.append(json.loads(_text(file.readline())))
        return found


def scan(path: str, columns: Mapping[str, str], numbers: Sequence[str] = ()) -> Table:
    """Read and check the whole file once. columns: role ("prompt", "answer", "chosen", "rejected") -> column name.
    numbers: columns that hold a finite number, or true or false, in every row.
    Raises a Failure with the first errors, each with its line, and the number of the others."""
    offsets, lines = array("Q"), array("Q")
    errors: list[Diagnostic] = []
    more = 0
    with _open(path) as file:
        stamp, offset = _stamp(file.fileno()), 0
        for number, raw in enumerate(file, 1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                continue
            found = check_line(raw, f"{path}:{number}", columns, numbers)
            room = max(0, SHOWN - len(errors))
            errors += found[:room]
            more += len(found[room:])
            offsets.append(start)
            lines.append(number)
    if more:
        errors[-1] = replace(errors[-1], notes=(*errors[-1].notes, f"and {more} more"))
    if errors:
        raise Failure(errors)
    if not offsets:
        raise fail("RL0742", "this data file is empty", place=path, help="write one JSON object a line")
    return Table(path, offsets, lines, stamp)


def check_line(raw: bytes, place: str, columns: Mapping[str, str], numbers: Sequence[str] = ()) -> list[Diagnostic]:
    """What is wrong with one line."""
    try:
        row = json.loads(_text(raw))
    except UnicodeDecodeError as error:
        return [Diagnostic("RL0743", f"byte {error.start + 1} of this line is not UTF-8", place=place,
                           help="save the file as UTF-8")]
    except (json.JSONDecodeError, RecursionError) as error:
        where = f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}" if isinstance(
            error, json.JSONDecodeError) else "it is nested too deeply"
        return [Diagnostic("RL0744", f"this line is not JSON: {where}", place=place,
                           help='each line is one object, such as {"prompt": "2+2="}')]
    if not isinstance(row, dict):
        return [Diagnostic("RL0745", f"this line is {_kind(row)}, not an object", place=place,
                           help='each line is one object, such as {"prompt": "2+2="}')]
    found = [_check_column(row, role, name, place) for role, name in columns.items()]
    found += [_check_number(row, name, place) for name in numbers]
    return [d for d in found if d is not None]


def _check_number(row: Row, name: str, place: str) -> Diagnostic | None:
    if name not in row:
        there = ", ".join(f"`{k}`" for k in row) or "none"
        return Diagnostic("RL0746", f"the column `{name}` is missing", place=place, notes=(f"columns here: {there}",),
                          help="every row needs it, as the data declaration says with `numbers=`")
    value = row[name]
    if not isinstance(value, (int, float)) or abs(value) > LARGEST or value != value:
        kind = "not a finite number" if isinstance(value, (int, float)) else f"{_kind(value)}, not a number"
        return Diagnostic("RL0747", f"the column `{name}` is {kind}", place=place)
    return None


def _check_column(row: Row, role: str, name: str, place: str) -> Diagnostic | None:
    if name not in row:
        there = ", ".join(f"`{k}`" for k in row) or "none"
        near = get_close_matches(name, list(row), n=1, cutoff=0.5)
        return Diagnostic("RL0746", f"the column `{name}` is missing", place=place, notes=(f"columns here: {there}",),
                          help=f"did you mean `{near[0]}`? Say `{role}=\"{near[0]}\"` in the data declaration"
                          if near else f"add it, or name another with `{role}=\"...\"` in the data declaration")
    value = row[name]
    if role == "prompt" and isinstance(value, list) and value:
        if all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value):
            return None
        return Diagnostic("RL0747", f"the column `{name}` is a list, but not of chat messages", place=place,
                          help='a message is {"role": "user", "content": "..."}')
    if not isinstance(value, str):
        wanted = "text or a list of chat messages" if role == "prompt" else "text"
        kind = "an empty list" if value == [] else _kind(value)
        return Diagnostic("RL0747", f"the column `{name}` is {kind}, not {wanted}", place=place)
    if role == "prompt" and not value:
        return Diagnostic("RL0749", "the prompt is empty", place=place, help="remove the line")
    try:
        value.encode()
    except UnicodeEncodeError:
        return Diagnostic("RL0743", f"the column `{name}` holds half of a surrogate pair", place=place,
                          help="write characters as UTF-8, or as both halves of their escape")
    return None


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list",
             dict: "an object", type(None): "null"}
    return names[type(value)]


def _text(raw: bytes) -> str:
    return raw.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n").decode()


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _open(path: str) -> Any:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        folder = Path(path).parent
        there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        near = get_close_matches(Path(path).name, there, n=1)
        raise fail("RL0741", "there is no such data file", place=path, help=f"did you mean `{folder / near[0]}`?"
                   if near else "paths are relative to the working directory") from None
    except OSError as error:
        raise fail("RL0741", f"this data file cannot be opened: {error.strerror}", place=path) from None
