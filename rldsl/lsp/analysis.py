"""All that is known about one text: its tree, its names, its mistakes, its facts. Made once for each version.

In: a path, a text, and the files around it. Out: an `Analysis`, for a broken text too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rldsl import api
from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build_recovering
from rldsl.lsp.facts import Facts, facts
from rldsl.lsp.index import Index
from rldsl.lsp.library import Library
from rldsl.placement.place import placements_of
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse_recovering


@dataclass(frozen=True, slots=True)
class Analysis:
    """What the editor features read of one file."""

    source: SourceFile  # the text
    file: ast.File  # its syntax tree
    index: Index  # names and where they occur
    facts: Facts  # what the compiler found out; empty for a text without a flow (a module, a placement file)
    diagnostics: tuple[Diagnostic, ...]  # those of this file alone


def analyze(path: str, text: str, files: Library, read: Callable[[str], str]) -> Analysis:
    """read: a text by its path, as the compiler wants it (raises OSError)."""
    source = SourceFile(path, text)
    file, broken = parse_recovering(source)
    made = files.of(path, text, file)
    program = any(isinstance(i, ast.Flow) for i in file.items)
    if broken or not program:
        found = broken or _alone(file, files, read)
        return Analysis(source, file, made, Facts(), _own(found, source))
    graph, found = build_recovering(file, {}, None, read, files.parse)
    found = api.diagnostics_of([file], graph, found)
    known = Facts()
    if graph is not None:
        try:
            known = facts(graph, placements_of(graph))
        except Failure:
            known = facts(graph, {})
    return Analysis(source, file, made, known, _own(found, source))


def _alone(file: ast.File, files: Library, read: Callable[[str], str]) -> tuple[Diagnostic, ...]:
    """The errors of a file without a flow; that it has none is not an error here."""
    if any(isinstance(i, ast.PlaceRule) for i in file.items):
        return ()
    return tuple(d for d in build_recovering(file, {}, None, read, files.parse)[1] if d.code != "RL0109")


def _own(found: tuple[Diagnostic, ...], source: SourceFile) -> tuple[Diagnostic, ...]:
    return tuple(d for d in found if d.span is not None and d.span.file.name == source.name)
