"""The check of a file, row by row: what is wrong with it, and how many pairs each row makes.

In: rows as dicts, and what the program needs of them. Out: a `ScannedFile`, or diagnostics.
Codes: those of `row_errors.py`, RL0802 pairs with two equal sides.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rldsl.diag import Diagnostic, Failure, counted
from rldsl.runtime.data.images import check_images
from rldsl.runtime.data.implicit_prompts import ImplicitPromptRows, same_answers, with_implicit_prompt
from rldsl.runtime.data.row_errors import check_row, missing
from rldsl.runtime.data.row_schema import SIDES, Row, RowNeeds, ScannedFile, Table, several

MAX_ERRORS = 5  # different ones that are reported in full, and places of equal ones; the others are counted


@dataclass(slots=True)
class RowErrors:
    """The first errors of many, each with the rows that have the same, and the number of the others."""

    found: list[Diagnostic] = field(default_factory=list)  # the first ones that differ, at most `MAX_ERRORS`
    places: list[list[str]] = field(default_factory=list)  # of other rows with the same error, the first `MAX_ERRORS`
    same: list[int] = field(default_factory=list)          # how many other rows have the same error
    more: int = 0                                          # how many errors that are none of these there are
    _index: dict[Diagnostic, int] = field(default_factory=dict)  # of an error in `found`, by what it says

    def add(self, found: Sequence[Diagnostic]) -> None:
        for error in found:
            says = replace(error, place="")
            if (known := self._index.get(says)) is not None:
                self.same[known] += 1
                self.places[known] += [error.place] * (len(self.places[known]) < MAX_ERRORS)
            elif len(self.found) < MAX_ERRORS:
                self._index[says] = len(self.found)
                self.found.append(error)
                self.places.append([])
                self.same.append(0)
            else:
                self.more += 1

    def stop(self) -> None:
        """Raises a Failure if there are any."""
        found = []
        for error, places, same in zip(self.found, self.places, self.same, strict=True):
            others = ", ".join(places) + (", ..." if same > len(places) else "")
            notes = (f"the same in {counted(same, 'other row')}: {others}",) if same else ()
            found.append(replace(error, notes=(*error.notes, *notes)))
        if self.more:
            found[-1] = replace(found[-1], notes=(*found[-1].notes, f"and {counted(self.more, 'other error')}"))
        if found:
            raise Failure(found)


@dataclass(slots=True)
class RowCheck:
    """What is wrong with a file, gathered row by row; and how many pairs each row makes."""

    needs: RowNeeds                                                 # what the rows must have
    errors: RowErrors = field(default_factory=RowErrors)            # what is wrong so far
    counts: array[int] = field(default_factory=lambda: array("I"))  # for each row so far, how many pairs it makes
    lists: bool = False                                             # whether a row has lists of answers
    images_per_row: int = 0                                         # of the row with most images so far
    shared: int = 0                                                 # rows so far whose prompt both sides begin with
    pairs: int = 0                                                  # that the rows so far make
    equal_sides: int = 0                                            # pairs so far whose sides are equal
    first_equal: str = ""                                           # the place of the first of these

    def row(self, row: Row, path: str, number: int, escapes: bool = False) -> None:
        """escapes: whether texts may hold half a surrogate pair, as JSON can write it."""
        roles = self.needs.roles
        if self.needs.implicit_prompts:
            before, row = row, with_implicit_prompt(row, roles)
            self.shared += row is not before
        if escapes or self.needs.numbers or self.needs.answers or not _plainly_fits(row, roles):
            self.errors.add(check_row(row, f"{path}:{number}", self.needs))
        if self.needs.images:
            self._images(row, f"{path}:{number}")
        if "chosen" in roles:
            value, other = row.get(roles["chosen"]), row.get(roles["rejected"])
            self.lists |= several(value)
            self.counts.append(len(value) if several(value) else 1)  # type: ignore[arg-type]  # a list
            self.pairs += self.counts[-1]
            if equal := _equal_sides(value, other):
                self.equal_sides += equal
                self.first_equal = self.first_equal or f"{path}:{number}"

    def _images(self, row: Row, place: str) -> None:
        if self.needs.images not in row:
            self.errors.add([missing("images", self.needs.images, list(row), place)])
            return
        count, wrong = check_images(row, self.needs.images, self.needs.folder, place)
        self.images_per_row = max(self.images_per_row, count)
        self.errors.add(wrong)

    def finish(self, table: Table) -> ScannedFile:
        """Raises a Failure if there are errors."""
        self.errors.stop()
        equal = self._equal()
        if equal and equal.severity == "error":
            raise Failure([equal])
        table = ImplicitPromptRows(table, self.needs.roles) if self.shared else table
        return ScannedFile(table, self.needs.roles, self.counts if self.lists else None, self.images_per_row,
                           self.shared, (equal,) if equal else ())

    def _equal(self) -> Diagnostic | None:
        """RL0802 for pairs whose sides are equal: a warning, and an error if there are no others."""
        if not self.equal_sides:
            return None
        sides = " and ".join(f"`{self.needs.roles[side]}`" for side in SIDES)
        if self.equal_sides == self.pairs:
            return Diagnostic("RL0802", f"{sides} are equal in every row", place=self.first_equal,
                              help="a pair needs two different answers: check what wrote the file, and which columns "
                                   "the data declaration names")
        return Diagnostic("RL0802", f"{sides} are equal in {self.equal_sides} of {counted(self.pairs, 'pair')}",
                          place=self.first_equal, severity="warning",
                          notes=("this is the first of them",) if self.equal_sides > 1 else (),
                          help="no side of such a pair is preferred, so it counts in every mean and teaches nothing: "
                               "remove it")


def _plainly_fits(row: Row, roles: Mapping[str, str]) -> bool:
    """Whether all that is needed is text, as in most rows: then nothing else has to be checked."""
    for role, name in roles.items():
        value = row.get(name)
        if type(value) is not str or not value and role == "prompt":
            return False
    return True


def _equal_sides(chosen: Any, rejected: Any) -> int:
    """How many pairs of a row have two equal sides."""
    if several(chosen) and several(rejected):
        return sum(map(same_answers, chosen, rejected))  # another number of them is another error
    return int(same_answers(chosen, rejected))
