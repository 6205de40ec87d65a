"""Files that a program imports: the standard library, and neighbours, saved or open in the editor.

In: a module as `use` names it and the importing file. Out: its text and index, each made once as long as it is the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from rldsl.lsp.index import Index, index
from rldsl.semantics.modules import LIBRARY, beside, library
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse_recovering

Read = Callable[[str], str | None]  # path -> its text, or None


class Library:
    """read: how to get at a file that may be open, unsaved, in the editor."""

    def __init__(self, read: Read):
        self.read = read
        self._known: dict[str, tuple[str, Index]] = {}
        self._open: list[str] = []

    def of(self, path: str, text: str, file: ast.File | None = None) -> Index:
        """The index of a text that is called `path`."""
        known = self._known.get(path)
        if known is not None and known[0] == text:
            return known[1]
        made = index(file if file is not None else parse_recovering(SourceFile(path, text))[0], self.load)
        self._known[path] = text, made
        return made

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
        """Where a module lies."""
        if module.startswith("std."):
            name = module.removeprefix("std.")
            return str(resources.files(LIBRARY) / f"{name}.rlf") if name in library() else None
        return beside(importer, module)

    def names(self, module: str, importer: str) -> tuple[str, ...]:
        """What can be imported from a module."""
        found = self.load(module, importer)
        return tuple(n for n, s in found.names.items() if s.kind in ("fn", "loss")) if found else ()


def read_file(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
