"""`rlc check`: what is wrong with a program, and with --fix what could be mended in its file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from rldsl import api
from rldsl.commands import Usage
from rldsl.diag import Diagnostic
from rldsl.files import write
from rldsl.plan.expr import Scalar
from rldsl.source import SourceFile

Found = tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """found: what is wrong now. mended: how many mistakes are no longer in the file. sure: how many of `found` --fix
    would mend."""

    found: Found
    mended: int
    sure: int

    @property
    def errors(self) -> int:
        return errors(self.found)


def _in_library(file: str) -> bool:
    """Whether the file is one of those that come with the compiler."""
    with resources.as_file(resources.files("rldsl.stdlib")) as folder:
        return Path(file).resolve().parent == Path(folder).resolve()


def errors(found: Found) -> int:
    return sum(d.severity == "error" for d in found)


def check(file: str, sets: Mapping[str, Scalar], place: str | None, fix: bool,
          overrides: Sequence[str] = ()) -> Checked:
    """With `fix` the file is written if anything could be mended."""
    source = api.read_source(file)
    rules = api.read_source(place) if place else None

    def again(source: SourceFile) -> Found:
        return api.examine(source.text, source.name, sets=sets, place=rules, overrides=overrides)

    if fix and _in_library(file):
        raise Usage(f"{file} belongs to the standard library, which `--fix` leaves alone; copy it first")
    found, mended = again(source), 0
    if fix:
        source, found, mended = mend(source, found, again)
        if mended:
            write(source.name, source.text.encode())
    return Checked(found, mended, sum(d.fix is not None and d.fix.edits[0][0].file == source for d in found))


def mend(source: SourceFile, found: Found, again: Callable[[SourceFile], Found]) -> tuple[SourceFile, Found, int]:
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
