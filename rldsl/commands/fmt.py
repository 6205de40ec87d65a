"""`rlc fmt`: which files, and what becomes of each.

In: paths as typed. Out: a `Formatted` for every file that could be read and parsed, and the diagnostics of the others.
Nothing is written here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import TypeVar

from rldsl.api import decode, read_source
from rldsl.diag import Diagnostic, Failure, fail
from rldsl.source import SourceFile
from rldsl.syntax.format import format

STDIN, SHOWN = "-", "<stdin>"  # as typed, as shown
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Formatted:
    """One program before and after."""

    path: str  # of the file
    before: str  # its text
    after: str  # the formatted text

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def diff(self) -> str:
        """As `diff -u` shows it."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
                       for line in unified_diff(before, after, self.path, f"{self.path} (formatted)"))


def formatted(paths: Sequence[str], stdin: bytes) -> tuple[list[Formatted], list[Diagnostic]]:
    """Every program of `paths`, each once: files, the .rlf files in and below directories, and STDIN."""
    done: list[Formatted] = []
    found: list[Diagnostic] = []

    def keep(make: Callable[[], T], into: list[T]) -> None:
        try:
            into.append(make())
        except Failure as failure:
            found.extend(failure.diagnostics)

    named: list[list[str]] = []
    for path in paths:
        keep(partial(_programs, path), named)
    for path in dict.fromkeys(p for names in named for p in names):
        keep(partial(_format_path, path, stdin), done)
    return done, found


def _format_path(path: str, stdin: bytes) -> Formatted:
    return _formatted(decode(SHOWN, stdin) if path == STDIN else read_source(path))


def _formatted(source: SourceFile) -> Formatted:
    return Formatted(source.name, source.text, format(source))


def _programs(path: str) -> list[str]:
    """The files that a path names. Errors: RL0092 a directory without programs."""
    if path == STDIN or not os.path.isdir(path):
        return [path]
    found = []
    for folder, below, names in os.walk(path):  # passes over what cannot be read or vanishes; rglob raises
        below[:] = [name for name in below if not name.startswith(".")]
        files = (Path(folder) / name for name in names if name.endswith(".rlf") and not name.startswith("."))
        found += [str(file) for file in files if file.is_file()]
    found.sort()
    if not found:
        raise fail("RL0092", f"no .rlf files in {path}", place=path,
                   help="pass a program, or a directory of programs")
    return found
