"""`rlc check`: the errors of a program, and with --fix the fixes applied to its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from rldsl import api
from rldsl.commands import Usage
from rldsl.diag import Diagnostic
from rldsl.files import write
from rldsl.plan.expr import Scalar
from rldsl.source import SourceFile

Found = tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """What `rlc check` found and fixed."""

    found: Found    # what is wrong now
    fixed: int      # how many errors are no longer in the file
    sure: int       # how many of `found` --fix would fix

    @property
    def errors(self) -> int:
        return errors(self.found)


def _in_library(file: str) -> bool:
    """Whether the file is one of those that come with the compiler."""
    with resources.as_file(resources.files("rldsl.stdlib")) as folder:
        return os.path.dirname(os.path.realpath(file)) == os.path.realpath(folder)


def errors(found: Found) -> int:
    return sum(d.severity == "error" for d in found)


def check(file: str, sets: Mapping[str, Scalar], place: str | None, fix: bool,
          overrides: Sequence[str] = ()) -> Checked:
    """With `fix` the file is written if anything could be fixed."""
    source = api.read_source(file)
    rules = api.read_source(place) if place else None

    def again(source: SourceFile) -> Found:
        return api.examine(source.text, source.name, sets=sets, place=rules, overrides=overrides)

    if fix and _in_library(file):
        raise Usage(f"{file} belongs to the standard library, which `--fix` does not change; copy it first")
    found, fixed = again(source), 0
    if fix:
        source, found, fixed = apply_fixes(source, found, again)
        if fixed:
            write(source.name, source.text.encode())
    return Checked(found, fixed, sum(d.fix is not None and d.fix.edits[0][0].file == source for d in found))


def apply_fixes(source: SourceFile, found: Found,
                again: Callable[[SourceFile], Found]) -> tuple[SourceFile, Found, int]:
    """Fix and check again, until nothing sure is left; what is fixed must not make more errors."""
    from rldsl.fix import apply

    best, total = (source, found), 0
    for _ in range(10):  # syntax first, then names, which a syntax error hides
        text, number = apply(source, found)
        if not number or text == source.text:
            break
        hidden = any(d.code.startswith("RL00") for d in found)
        source = replace(source, text=text)
        before, found = found, again(source)
        if errors(found) > errors(before) and not hidden:
            break
        best, total = (source, found), total + number
    return *best, total
