"""From a name that a program takes from Python to where Python defines it.

In: the path that `use py` names, and folders to look in. Out: a file and a line. Nothing is imported or executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path

STD = "std/"  # of paths in the library


def candidates(path: str, folders: Iterable[str]) -> list[str]:
    """Where the file may be. Paths of a program are relative to the directory in which `rlc` runs, which an editor does
    not know: the folders are tried in order."""
    if path.startswith(STD):
        return [str(resources.files("rldsl.stdlib").joinpath(path.removeprefix(STD)))]
    return [path] if Path(path).is_absolute() else [str(Path(folder) / path) for folder in folders]


def definition(name: str, files: Iterable[str], read: Callable[[str], str | None]) -> tuple[str, int, int] | None:
    """(file, line, column), from 0, of the name in the first file that defines it at its top level."""
    for file in files:
        try:
            tree = ast.parse(read(file) or "")
        except (SyntaxError, ValueError):
            continue
        for node in reversed(tree.body):  # the last definition is the one that counts
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                keyword = {ast.FunctionDef: "def ", ast.ClassDef: "class "}.get(type(node), "async def ")
                return file, node.lineno - 1, node.col_offset + len(keyword)
            targets = node.targets if isinstance(node, ast.Assign) else ()
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return file, node.lineno - 1, node.col_offset
    return None
