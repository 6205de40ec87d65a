"""The server's state: the texts that an editor has open, what is known of them, and the protocol's places in them.

In: uris and positions of an editor. Out: analyses of the newest texts, and ranges, locations and diagnostics for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lsprotocol import types as t
from pygls import uris
from pygls.lsp.server import LanguageServer

from rldsl.diag import Diagnostic, present
from rldsl.explain import page_file
from rldsl.lsp.analysis import Analysis, analyze
from rldsl.lsp.forecast import Forecast, Question
from rldsl.lsp.forecasts import Forecasts
from rldsl.lsp.index import Index, Occurrence, Symbol
from rldsl.lsp.library import Library, read_file
from rldsl.lsp.rename import in_library
from rldsl.lsp.text import Lines
from rldsl.semantics.modules import library
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast

UNUSED = "RL0901"  # a name that nothing uses: editors show it faded
Feature = Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]


class Server(LanguageServer):
    """One for each editor. analyses: path -> what is known of its newest text. cluster: what the editor's setting says
    to predict on; "" is nothing."""

    def __init__(self) -> None:
        try:
            number = version("rldsl")
        except PackageNotFoundError:
            number = "0"
        super().__init__("rlc lsp", number)
        self.files = Library(self.text_of)
        self.analyses: dict[str, Analysis] = {}
        self.waiting: dict[str, asyncio.Task[None]] = {}
        self.cluster = ""
        self.forecasts = Forecasts(self._ask_again)

    def configure(self, settings: Any) -> None:
        """settings: {"cluster": ...} or {"rlf": {"cluster": ...}}, as editors send them; anything else says nothing."""
        own = settings.get("rlf", settings) if isinstance(settings, dict) else {}
        cluster = own.get("cluster") if isinstance(own, dict) else None
        if isinstance(cluster, str) and cluster.strip() != self.cluster:
            self.cluster = cluster.strip()
            self._ask_again()

    def _ask_again(self) -> None:
        """Tell the editor that code lenses have changed, if it supports that."""
        workspace = self.client_capabilities.workspace
        lens = workspace.code_lens if workspace is not None else None
        if lens is not None and lens.refresh_support:
            self.workspace_code_lens_refresh(None)

    def forecast(self, analysis: Analysis, always: bool = False) -> Forecast | None:
        """The forecast of a program that has a cluster and no errors; None at first, known when the editor asks again.
        always: without a cluster, too."""
        declared = any(isinstance(i, ast.Cluster) for i in analysis.file.items)
        flow = any(isinstance(i, ast.Flow) for i in analysis.file.items)
        wrong = any(d.severity == "error" for d in analysis.diagnostics)
        if not flow or wrong or not (declared or self.cluster or always):
            return None
        own = analysis.source
        texts = {path_of(uri): d.source for uri, d in self.workspace.text_documents.items()}
        reads = self.files.reads(own.name)
        unsaved = {p: text for p, text in texts.items() if p in reads and p != own.name and read_file(p) != text}
        return self.forecasts.of(Question(own.name, own.text, unsaved, self.cluster))

    def text_of(self, path: str) -> str | None:
        """A file as the editor has it, else as it is saved."""
        open_ = {path_of(uri): d for uri, d in self.workspace.text_documents.items()}
        found = open_.get(str(Path(path).resolve()))
        return found.source if found is not None else read_file(path)

    def read(self, path: str) -> str:
        text = self.text_of(path)
        if text is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return text

    def analysis(self, uri: str) -> Analysis:
        text, path = self.workspace.get_text_document(uri).source, path_of(uri)
        known = self.analyses.get(path)
        if known is None or known.source.text != text:
            known = self.analyses[path] = analyze(path, text, self.files, self.read)
        return known

    def lines(self, source: SourceFile) -> Lines:
        encoding = str(getattr(self.workspace.position_encoding, "value", self.workspace.position_encoding))
        return Lines(source.text, encoding)

    def range(self, span: Span) -> t.Range:
        lines = self.lines(span.file)
        return t.Range(t.Position(*lines.position(span.start)), t.Position(*lines.position(span.end)))

    def location(self, span: Span) -> t.Location:
        return t.Location(uri_of(span.file.name), self.range(span))

    def offset(self, analysis: Analysis, position: t.Position) -> int:
        return self.lines(analysis.source).offset(position.line, position.character)

    def at(self, params: Any) -> tuple[Analysis, Occurrence | None]:
        analysis = self.analysis(params.text_document.uri)
        return analysis, analysis.index.at(self.offset(analysis, params.position))

    def everywhere(self, symbol: Symbol) -> list[Occurrence]:
        """All uses of a symbol, in every .rlf of the workspace and of the library that could see it."""
        found = {(o.span.file.name, o.span.start): o for i in self.indices(symbol) for o in i.uses(symbol)}
        return [found[key] for key in sorted(found)]

    def indices(self, symbol: Symbol | None = None) -> list[Index]:
        """The indices of the open files and of those in the workspace; with the file of `symbol`, and its neighbors in
        the library where it is from there."""
        paths = {path_of(uri) for uri in self.workspace.text_documents}
        for folder in self.workspace.folders.values():
            paths |= set(programs(path_of(folder.uri)))
        if symbol is not None:
            paths.add(str(Path(symbol.span.file.name).resolve()))
            if in_library(symbol):
                paths |= {path for m in library() if (path := self.files.path(f"std.{m}", "")) is not None}
        return [self.files.of(p, text) for p in sorted(paths) if (text := self.text_of(p)) is not None]


def programs(folder: str) -> Iterator[str]:
    """The .rlf files below a folder; not those of hidden folders, installed packages and runs."""
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("node_modules", "__pycache__", "runs")]
        yield from (os.path.join(root, n) for n in names if n.endswith(".rlf"))


def path_of(uri: str) -> str:
    return str(Path(uris.to_fs_path(uri) or uri).resolve())


def uri_of(path: str) -> str:
    return uris.from_fs_path(str(Path(path).resolve())) or path


def diagnostic(server: Server, d: Diagnostic) -> t.Diagnostic:
    """A diagnostic of this file, as the protocol wants it."""
    span = present(d.span, f"location of {d.code}", "lsp")
    text = d.title + (f": {d.label}" if d.label else "") + (f"\nhelp: {d.help}" if d.help else "")
    related = [t.DiagnosticRelatedInformation(server.location(label.span), label.text) for label in d.labels]
    severity = t.DiagnosticSeverity.Error if d.severity == "error" else t.DiagnosticSeverity.Warning
    page = page_file(d.code)
    return t.Diagnostic(server.range(span), text, severity, d.code, source="rlc", related_information=related or None,
                        code_description=t.CodeDescription(uri_of(page)) if page else None,
                        tags=[t.DiagnosticTag.Unnecessary] if d.code == UNUSED else None)
