"""Files that a program imports: the standard library, and neighbors, saved or open in the editor.

In: a module as `use` names it and the importing file. Out: its text and index, each made once as long as it is the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rldsl.lsp.index import Index, Symbol, index
from rldsl.semantics.modules import LIBRARY, library, python_path, relative_path
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse, parse_recovering

Read = Callable[[str], str | None]  # path -> its text, or None


class Library:
    """read: how to get at a file that may be open, unsaved, in the editor."""

    def __init__(self, read: Read):
        self.read = read
        self._known: dict[str, tuple[str, Index]] = {}
        self._trees: dict[str, ast.File] = {}
        self._open: list[str] = []

    def of(self, path: str, text: str, file: ast.File | None = None) -> Index:
        """The index of a text that is called `path`."""
        known = self._known.get(path)
        if known is not None and known[0] == text:
            return known[1]
        made = index(file if file is not None else parse_recovering(SourceFile(path, text))[0], self.load)
        self._known[path] = text, made
        return made

    def parse(self, source: SourceFile) -> ast.File:
        """The tree of an imported file, as the compiler wants it. Errors: those of `syntax.parse`."""
        known = self._trees.get(source.name)
        if known is None or known.source != source:
            known = self._trees[source.name] = parse(source)
        return known

    def load(self, module: str, importer: str) -> Index | None:
        """The index of an imported module; None for what cannot be read or imports itself."""
        path = self.path(module, importer)
        text = self.read(path) if path else None
        if path is None or text is None or path in self._open:
            return None
        self._open.append(path)
        try:
            return self.of(path, text)
        finally:
            self._open.pop()

    def path(self, module: str, importer: str) -> str | None:
        """Where a module lies: in full, so that a file has one name whoever asks."""
        if module.startswith("std."):
            name = module.removeprefix("std.")
            return str(Path(str(resources.files(LIBRARY) / f"{name}.rlf")).resolve()) if name in library() else None
        return str(Path(relative_path(importer, module)).resolve())

    def reads(self, path: str) -> set[str]:
        """The files that a program reads, in full: its imports and theirs, Python files, the cluster. Not the standard
        library's."""
        found: set[str] = set()
        left = [path]
        while left:
            one = left.pop()
            text = self.read(one)
            items = self.of(one, text).file.items if text is not None else ()
            imported = {p for i in items if isinstance(i, ast.Use) and (p := self._own_module(i.module, one))} - found
            left += sorted(imported)
            found |= imported
            for item in items:
                if isinstance(item, ast.UsePy):
                    found.add(str(Path(python_path(one, item.path)).resolve()))
                elif isinstance(item, ast.Cluster) and item.path is not None:
                    found.add(str(Path(item.path).resolve()))
        return found

    def _own_module(self, module: str, importer: str) -> str | None:
        return None if module.startswith("std.") else self.path(module, importer)

    def names(self, module: str, importer: str) -> tuple[Symbol, ...]:
        """What can be imported from a module: the functions and losses that it declares."""
        found = self.load(module, importer)
        return tuple(s for s in found.symbols if s.kind in ("fn", "loss") and not s.inside) if found else ()

    def shelf(self) -> dict[str, tuple[Symbol, ...]]:
        """What can be imported from the modules of the standard library that have been looked at."""
        paths = {m: self.path(f"std.{m}", "") for m in library() if m != "prelude"}
        return {f"std.{m}": self.names(f"std.{m}", "") for m, path in paths.items() if path in self._known}


def read_file(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
