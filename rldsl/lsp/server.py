"""The protocol: pygls calls these handlers, and they turn answers of the pure modules into its records.

In: an editor's requests. Out: answers, each worked out from the newest text. Diagnostics follow a change after a
moment's quiet; an old text's are never shown with a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lsprotocol import types as t
from pygls import uris
from pygls.lsp.server import LanguageServer

from rldsl.diag import Diagnostic, Failure
from rldsl.lsp import outline, tokens
from rldsl.lsp.analysis import Analysis, analyse
from rldsl.lsp.complete import Item, call_at, complete
from rldsl.lsp.describe import hover, signature, word
from rldsl.lsp.facts import layout_text
from rldsl.lsp.hints import hints
from rldsl.lsp.index import Occurrence, Symbol
from rldsl.lsp.library import Library, read_file
from rldsl.lsp.text import Lines
from rldsl.source import SourceFile, Span

QUIET = 0.15  # seconds without a change before a text is looked at
KINDS = {"keyword": t.CompletionItemKind.Keyword, "function": t.CompletionItemKind.Function,
         "method": t.CompletionItemKind.Method, "variable": t.CompletionItemKind.Variable,
         "option": t.CompletionItemKind.Property, "field": t.CompletionItemKind.Field,
         "module": t.CompletionItemKind.Module, "class": t.CompletionItemKind.Class,
         "level": t.CompletionItemKind.EnumMember}
SYMBOLS = {"fn": t.SymbolKind.Function, "loss": t.SymbolKind.Function, "flow": t.SymbolKind.Module,
           "model": t.SymbolKind.Class, "data": t.SymbolKind.Class, "mesh": t.SymbolKind.Array,
           "param": t.SymbolKind.Constant, "state": t.SymbolKind.Variable, "python": t.SymbolKind.Function,
           "metric": t.SymbolKind.Event}


class Server(LanguageServer):
    """One for each editor. analyses: path -> (text, what is known of it)."""

    def __init__(self) -> None:
        try:
            number = version("rldsl")
        except PackageNotFoundError:
            number = "0"
        super().__init__("rlc lsp", number)
        self.files = Library(self._text)
        self.analyses: dict[str, Analysis] = {}
        self.waiting: dict[str, asyncio.Task[None]] = {}

    def _text(self, path: str) -> str | None:
        """A file as the editor has it, else as it is saved."""
        open_ = {path_of(uri): d for uri, d in self.workspace.text_documents.items()}
        found = open_.get(str(Path(path).resolve()))
        return found.source if found is not None else read_file(path)

    def read(self, path: str) -> str:
        text = self._text(path)
        if text is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return text

    def analysis(self, uri: str) -> Analysis:
        text, path = self.workspace.get_text_document(uri).source, path_of(uri)
        known = self.analyses.get(path)
        if known is None or known.source.text != text:
            known = self.analyses[path] = analyse(path, text, self.files, self.read)
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
        """All uses of a symbol, in every .rlf of the workspace that could see it."""
        found = {(o.span.file.name, o.span.start): o for i in self.indices() for o in i.uses(symbol)}
        return [found[key] for key in sorted(found)]

    def indices(self) -> list[Any]:
        paths = {path_of(uri) for uri in self.workspace.text_documents}
        for folder in self.workspace.folders.values():
            paths |= {str(p) for p in Path(path_of(folder.uri)).rglob("*.rlf") if ".venv" not in p.parts}
        return [self.files.of(p, text) for p in sorted(paths) if (text := self._text(p)) is not None]


def path_of(uri: str) -> str:
    return str(Path(uris.to_fs_path(uri) or uri).resolve())


def uri_of(path: str) -> str:
    return uris.from_fs_path(str(Path(path).resolve())) or path


# ---------------------------------------------------------------------------------------------- diagnostics


def diagnostic(server: Server, d: Diagnostic) -> t.Diagnostic:
    assert d.span is not None
    text = d.title + (f": {d.label}" if d.label else "") + (f"\nhelp: {d.help}" if d.help else "")
    related = [t.DiagnosticRelatedInformation(server.location(label.span), label.text) for label in d.labels]
    severity = t.DiagnosticSeverity.Error if d.severity == "error" else t.DiagnosticSeverity.Warning
    return t.Diagnostic(server.range(d.span), text, severity, d.code, source="rlc", related_information=related or None)


def publish(server: Server, uri: str) -> None:
    found = [diagnostic(server, d) for d in server.analysis(uri).diagnostics]
    document = server.workspace.get_text_document(uri)
    server.text_document_publish_diagnostics(t.PublishDiagnosticsParams(uri, found, document.version))


async def later(server: Server, uri: str) -> None:
    await asyncio.sleep(QUIET)
    publish(server, uri)


def make() -> Server:
    """A server with all its handlers."""
    server = Server()
    feature = server.feature

    @feature(t.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: t.DidOpenTextDocumentParams) -> None:
        publish(server, params.text_document.uri)

    @feature(t.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: t.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if uri in server.waiting:
            server.waiting[uri].cancel()
        server.waiting[uri] = asyncio.create_task(later(server, uri))

    @feature(t.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: t.DidSaveTextDocumentParams) -> None:
        """What is imported may have changed for other open files."""
        server.analyses.clear()
        for uri in list(server.workspace.text_documents):
            publish(server, uri)

    @feature(t.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: t.DidCloseTextDocumentParams) -> None:
        server.analyses.pop(path_of(params.text_document.uri), None)
        server.text_document_publish_diagnostics(t.PublishDiagnosticsParams(params.text_document.uri, []))

    _writing(server, feature)
    _reading(server, feature)
    _finding(server, feature)
    return server


Feature = Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]


def _writing(server: Server, feature: Feature) -> None:
    """What helps while a text is being written."""

    @feature(t.TEXT_DOCUMENT_COMPLETION, t.CompletionOptions(trigger_characters=[".", " ", "("]))
    def completion(params: t.CompletionParams) -> list[t.CompletionItem]:
        analysis = server.analysis(params.text_document.uri)
        at = server.offset(analysis, params.position)
        found = complete(analysis.source.text, at, analysis.index, analysis.facts, server.files)
        return [_item(i, n) for n, i in enumerate(dict.fromkeys(found))]

    @feature(t.TEXT_DOCUMENT_SIGNATURE_HELP, t.SignatureHelpOptions(trigger_characters=["(", ","]))
    def help_(params: t.SignatureHelpParams) -> t.SignatureHelp | None:
        analysis = server.analysis(params.text_document.uri)
        at = server.offset(analysis, params.position)
        call = call_at(analysis.source.text, at)
        symbol = analysis.index.scope(at).get(call[0]) if call else None
        if call is None:
            return None
        text, words = signature(symbol) if symbol is not None else ("", ())
        if not words:
            page = word(call[0], False) or word(call[0], True)
            lines = page.splitlines()
            return t.SignatureHelp([t.SignatureInformation(lines[1], "\n".join(lines[4:]))]) if page else None
        start = analysis.source.text.rfind("(", 0, at)
        active = min(analysis.source.text.count(",", start, at), len(words) - 1)
        doc = getattr(symbol.tree, "doc", "") if symbol else ""
        return t.SignatureHelp([t.SignatureInformation(text, doc, [t.ParameterInformation(w) for w in words])], 0, active)

    @feature(t.TEXT_DOCUMENT_FORMATTING)
    def formatting(params: t.DocumentFormattingParams) -> list[t.TextEdit]:
        from rldsl.syntax.format import format

        analysis = server.analysis(params.text_document.uri)
        try:
            text = format(analysis.source)
        except Failure:  # a broken text stays as it is
            return []
        whole = Span(analysis.source, 0, len(analysis.source.text))
        return [] if text == analysis.source.text else [t.TextEdit(server.range(whole), text)]

    @feature(t.TEXT_DOCUMENT_CODE_ACTION, t.CodeActionOptions([t.CodeActionKind.QuickFix]))
    def actions(params: t.CodeActionParams) -> list[t.CodeAction]:
        analysis, out = server.analysis(params.text_document.uri), []
        for d in analysis.diagnostics:
            if d.fix is None or d.span is None or not _meets(server.range(d.span), params.range):
                continue
            edits = [t.TextEdit(server.range(span), new) for span, new in d.fix.edits]
            out.append(t.CodeAction(d.help or f"mend {d.code}", t.CodeActionKind.QuickFix, [diagnostic(server, d)],
                                    is_preferred=True, edit=t.WorkspaceEdit({params.text_document.uri: edits})))
        return out


def _item(i: Item, n: int) -> t.CompletionItem:
    insert = i.text if not i.text.endswith("=") else i.text
    return t.CompletionItem(i.text, kind=KINDS[i.kind], detail=i.detail or None, documentation=i.doc or None,
                            sort_text=f"{n:04}", insert_text=insert)


def _meets(a: t.Range, b: t.Range) -> bool:
    return (a.start.line, a.start.character) <= (b.end.line, b.end.character) \
        and (b.start.line, b.start.character) <= (a.end.line, a.end.character)


def _reading(server: Server, feature: Feature) -> None:
    """What helps to understand a text."""

    @feature(t.TEXT_DOCUMENT_HOVER)
    def hovering(params: t.HoverParams) -> t.Hover | None:
        analysis, found = server.at(params)
        if found is not None:
            text = hover(found.symbol, analysis.facts)
            return t.Hover(t.MarkupContent(t.MarkupKind.Markdown, text), server.range(found.span))
        at = server.offset(analysis, params.position)
        span = outline.word_at(analysis.source, at)
        text = word(span.text, analysis.source.text[: span.start].rstrip().endswith("."))
        return t.Hover(t.MarkupContent(t.MarkupKind.Markdown, text), server.range(span)) if text else None

    @feature(t.TEXT_DOCUMENT_INLAY_HINT)
    def inlay(params: t.InlayHintParams) -> list[t.InlayHint]:
        analysis = server.analysis(params.text_document.uri)
        lines = server.lines(analysis.source)
        first, last = lines.offset(params.range.start.line, 0), lines.offset(params.range.end.line + 1, 0)
        return [t.InlayHint(t.Position(*lines.position(at)), text, t.InlayHintKind.Type)
                for at, text in hints(analysis) if first <= at <= last]

    @feature(t.TEXT_DOCUMENT_CODE_LENS)
    def lens(params: t.CodeLensParams) -> list[t.CodeLens]:
        analysis = server.analysis(params.text_document.uri)
        return [t.CodeLens(server.range(c.span), t.Command(f"{c.name}: {layout_text(c.place)}", ""))
                for c in analysis.facts.calls if c.span.file == analysis.source]

    @feature(t.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL, t.SemanticTokensLegend(list(tokens.TYPES), list(tokens.MODIFIERS)))
    def semantic(params: t.SemanticTokensParams) -> t.SemanticTokens:
        analysis = server.analysis(params.text_document.uri)
        return t.SemanticTokens(tokens.encode(analysis.index, server.lines(analysis.source)))

    @feature(t.TEXT_DOCUMENT_FOLDING_RANGE)
    def folding(params: t.FoldingRangeParams) -> list[t.FoldingRange]:
        analysis = server.analysis(params.text_document.uri)
        return [t.FoldingRange(a, b, kind=t.FoldingRangeKind.Comment if comment else None)
                for a, b, comment in outline.folds(analysis.source.text)]

    @feature(t.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
    def symbols(params: t.DocumentSymbolParams) -> list[t.DocumentSymbol]:
        def shown(node: outline.Node) -> t.DocumentSymbol:
            kind = SYMBOLS.get(node.symbol.kind, t.SymbolKind.Variable)
            return t.DocumentSymbol(node.symbol.name, kind, server.range(node.span), server.range(node.symbol.span),
                                    detail=node.symbol.kind, children=[shown(c) for c in node.children])

        return [shown(n) for n in outline.outline(server.analysis(params.text_document.uri).index)]


def _finding(server: Server, feature: Feature) -> None:
    """From a name to where it is bound and used."""

    @feature(t.TEXT_DOCUMENT_DEFINITION)
    def definition(params: t.DefinitionParams) -> t.Location | None:
        _, found = server.at(params)
        return server.location(found.symbol.span) if found is not None else None

    @feature(t.TEXT_DOCUMENT_REFERENCES)
    def references(params: t.ReferenceParams) -> list[t.Location]:
        _, found = server.at(params)
        every = server.everywhere(found.symbol) if found is not None else []
        return [server.location(o.span) for o in every if params.context.include_declaration or not o.binds]

    @feature(t.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    def highlight(params: t.DocumentHighlightParams) -> list[t.DocumentHighlight]:
        analysis, found = server.at(params)
        uses = analysis.index.uses(found.symbol) if found is not None else ()
        return [t.DocumentHighlight(server.range(o.span)) for o in uses if o.span.file == analysis.source]

    @feature(t.TEXT_DOCUMENT_PREPARE_RENAME)
    def may_rename(params: t.PrepareRenameParams) -> t.Range | None:
        _, found = server.at(params)
        return server.range(found.span) if found is not None and _ours(found.symbol) else None

    @feature(t.TEXT_DOCUMENT_RENAME, t.RenameOptions(prepare_provider=True))
    def rename(params: t.RenameParams) -> t.WorkspaceEdit | None:
        _, found = server.at(params)
        if found is None or not _ours(found.symbol) or not outline.is_name(params.new_name):
            return None
        changes: dict[str, list[t.TextEdit]] = {}
        for o in server.everywhere(found.symbol):
            changes.setdefault(uri_of(o.span.file.name), []).append(t.TextEdit(server.range(o.span), params.new_name))
        return t.WorkspaceEdit(changes)

    @feature(t.WORKSPACE_SYMBOL)
    def workspace(params: t.WorkspaceSymbolParams) -> list[t.SymbolInformation]:
        wanted = params.query.lower()
        return [t.SymbolInformation(server.location(s.span), s.name, SYMBOLS.get(s.kind, t.SymbolKind.Variable))
                for i in server.indices() for s in i.symbols if not s.inside and wanted in s.name.lower()]


def _ours(symbol: Symbol) -> bool:
    """Names of the standard library are not ours to change; a metric is a text of the log."""
    from importlib import resources

    library = Path(str(resources.files("rldsl.stdlib"))).resolve()
    return library not in Path(symbol.span.file.name).resolve().parents
