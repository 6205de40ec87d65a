"""`rlc new`: a starter as files.

In: the name of a starter, and where it goes. Out: what to write, in order. Nothing is written here.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from rldsl import starters
from rldsl.commands import Usage
from rldsl.diag import fail


def files(name: str, target: str | None, force: bool) -> list[tuple[str, str]]:
    """(path, text): the program, then the Python and data files that it needs; those that exist are never overwritten.
    target: a file, a directory, or None for NAME.rlf here. Error: RL0094 the program exists already."""
    path = target or f"{name}.rlf"
    if os.path.isdir(path):
        path = str(Path(path) / f"{name}.rlf")
    text = program(name, path)
    if os.path.exists(path) and not force:
        raise fail("RL0094", f"cannot write {path}: the file exists", place=path,
                   help="choose another path with -o, or overwrite it with --force")
    python_files = ((str(Path(path).parent / file), content) for file, content in starters.used(name))
    return [(path, text), *(pair for pair in python_files if not Path(pair[0]).exists())]


def program(name: str, path: str = "") -> str:
    """The text of a starter; the commands in its comments name `path`."""
    names = starters.names()
    if name not in names:
        near = get_close_matches(name.lower().replace("-", "_"), names, n=1)
        raise Usage(f"no such starter: {name!r}; "
                    + (f"did you mean {near[0]}?" if near else f"starters: {', '.join(names)}"))
    return starters.text(name).replace(f"{name}.rlf", path or f"{name}.rlf")


def lines() -> dict[str, str]:
    """Starter -> what it is, in one line."""
    return {name: starters.line(name) for name in starters.names()}


def listing() -> str:
    """Every starter with its line."""
    found = lines()
    width = max(map(len, found))
    return "\n".join(f"{name:{width}}  {line}" for name, line in found.items())
