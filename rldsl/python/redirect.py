"""Python functions that are passed from Python replace those that the program's files define.

In: a parsed program, and functions by name. Out: the program with those functions declared in the file that holds the
captured source, which is written to the cache under its own hash; where the user wrote what is in it.
Errors: RL0790 as in `captured.py`, RL0793 a name that the program does not declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from rldsl.diag import fail
from rldsl.files import cache_folder, write
from rldsl.python.captured import Definition, captured
from rldsl.syntax import ast

Rewards = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Redirection:
    """What makes a program use functions of the caller."""

    path: str = ""                            # the file of the captured source; "": no functions were passed
    names: frozenset[str] = frozenset()       # of the functions
    definitions: tuple[Definition, ...] = ()  # what the file defines, and where the user wrote it

    def __call__(self, file: ast.File) -> ast.File:
        return replace(file, items=tuple(_items(file, self.path, self.names))) if self.names else file


def redirect(rewards: Rewards) -> Redirection:
    """What turns a program into one whose functions of these names are the given ones."""
    if not rewards:
        return Redirection()
    module = captured(rewards)
    return Redirection(_stored(module.text), frozenset(rewards), module.definitions)


def _items(file: ast.File, path: str, names: frozenset[str]) -> Iterator[ast.Declaration]:
    declared = [f.name.name for item in file.items if isinstance(item, ast.UsePy) for f in item.functions]
    for name in sorted(names - set(declared)):
        near = get_close_matches(name, declared, n=1)
        known = f"it declares {', '.join(f'`{n}`' for n in declared)}" if declared else "it declares none"
        raise fail("RL0793", f"the program declares no Python function `{name}`", place="rewards", notes=(known,),
                   help=f"did you mean `{near[0]}`?" if near else
                   f"declare it: use py \"rewards.py\" ({name}: gen -> seq)")
    for item in file.items:
        if not isinstance(item, ast.UsePy):
            yield item
            continue
        passed = tuple(f for f in item.functions if f.name.name in names)
        if kept := tuple(f for f in item.functions if f not in passed):
            yield replace(item, functions=kept)
        if passed:
            yield replace(item, functions=passed, path=path)


def _stored(text: str) -> str:
    """The file that holds the text. It is named after its hash, so it never changes, and a run can resume from it."""
    data = text.encode()
    folder = cache_folder() or Path(gettempdir(), "rldsl")
    file = folder / "functions" / f"{sha256(data).hexdigest()[:32]}.py"
    if not file.is_file() or file.read_bytes() != data:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(str(file), data, "set RLDSL_CACHE to a directory that can be written")
    return str(file)
