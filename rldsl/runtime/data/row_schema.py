"""What the rows of a file must have, whatever its format, and what a checked file is."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rldsl.diag import Diagnostic

Row = dict[str, Any]

SIDES = {"chosen": "pos_answers", "rejected": "neg_answers"}  # role -> the name of its column in ReaL's data


class Table(Protocol):
    """Rows by number, from 0."""

    def __len__(self) -> int: ...

    def place(self, row: int) -> str:
        """The file, and the line or row in it, from 1."""
        ...

    def read(self, rows: Sequence[int]) -> list[Row]:
        """Some rows, in the order asked for. Fails with RL0752 when the file is no longer the one that was checked."""
        ...


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """What every row must have."""

    roles: Mapping[str, str]       # "prompt", "answer", "chosen", "rejected" -> name of the column
    # columns with a finite number (or true or false) in every row; of rows with several answers one number, or one of
    # each answer
    numbers: tuple[str, ...] = ()
    answers: int = 0               # of each row; 0: one, which is not in a list
    images: str = ""               # the column with the images of each row; "": rows have none
    folder: Path = Path()          # to which paths of images are relative
    # whether the prompt of a pair may be what both sides begin with (`implicit_prompts.py`)
    implicit_prompts: bool = False

    def among(self, columns: Collection[str]) -> RowNeeds:
        """The same needs, with ReaL's names of the two sides of pairs if a file has these and not ours; and whether its
        prompts may be what both sides begin with."""
        if not SIDES.keys() <= self.roles.keys():
            return self
        if not set(SIDES.values()) <= set(columns):
            return replace(self, implicit_prompts=self.roles["prompt"] == "prompt" and not self.images)
        if any(self.roles[role] != role or role in columns for role in SIDES):
            return self
        return replace(self, roles={**self.roles, **SIDES})


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A checked file."""

    table: Table               # its rows
    roles: Mapping[str, str]   # as in `RowNeeds`
    counts: array[int] | None  # how many pairs each row makes; None: each is one row of the run
    images_per_row: int = 0    # of the row with most images
    implicit_prompts: int = 0    # rows whose prompt is what both sides begin with
    warnings: tuple[Diagnostic, ...] = ()  # about rows that can be read, and are probably not what was meant


def several(value: Any) -> bool:
    """Whether a side of a pair is a list of answers: of texts, or of lists of chat messages."""
    return isinstance(value, list) and not (value and isinstance(value[0], dict))


def kind_of(value: Any) -> str:
    """What a value is, in words of JSON."""
    if value == []:
        return "an empty list"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list",
             dict: "an object", type(None): "null"}
    return names.get(type(value)) or f"a {type(value).__name__}"
