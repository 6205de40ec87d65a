"""What helps to understand a text: hover, hints, symbols; and from a name to where it is bound and used.

In: a Server, and how it takes a handler. Out: nothing; its handlers answer from the newest analysis.
"""

from __future__ import annotations

import os
from pathlib import Path

from lsprotocol import types as t
from pygls.exceptions import JsonRpcInvalidParams

from rldsl.diag import present
from rldsl.lsp import outline, tokens
from rldsl.lsp.analysis import Analysis
from rldsl.lsp.complete import option
from rldsl.lsp.describe import Costs, hover, placed, word
from rldsl.lsp.hints import hints
from rldsl.lsp.index import Symbol
from rldsl.lsp.lens import cost, lenses
from rldsl.lsp.python_files import candidates
from rldsl.lsp.python_files import definition as defined_at
from rldsl.lsp.rename import in_library, refusal
from rldsl.lsp.selection import selections
from rldsl.lsp.session import Feature, Server, path_of, uri_of
from rldsl.semantics.modules import python_path
from rldsl.syntax import ast

SYMBOLS = {"fn": t.SymbolKind.Function, "loss": t.SymbolKind.Function, "flow": t.SymbolKind.Module,
           "model": t.SymbolKind.Class, "data": t.SymbolKind.Class, "mesh": t.SymbolKind.Array,
           "param": t.SymbolKind.Constant, "state": t.SymbolKind.Variable, "buffer": t.SymbolKind.Array,
           "python": t.SymbolKind.Function,
           "metric": t.SymbolKind.Event}


def reading(server: Server, feature: Feature) -> None:
    """Register the handlers."""
    _showing(server, feature)
    _finding(server, feature)


def _showing(server: Server, feature: Feature) -> None:
    """What helps to understand a text."""

    def costs(analysis: Analysis) -> Costs:
        """The forecast of a call that is looked at, whether or not the program has a cluster."""
        return lambda call: cost(call, server.forecast(analysis, always=True))

    @feature(t.TEXT_DOCUMENT_HOVER)
    def hovering(params: t.HoverParams) -> t.Hover | None:
        analysis, found = server.at(params)
        if found is not None:
            text = hover(found.symbol, analysis.facts, costs(analysis))
            return t.Hover(t.MarkupContent(t.MarkupKind.Markdown, text), server.range(found.span))
        at = server.offset(analysis, params.position)
        span = outline.word_at(analysis.source, at)
        text = word(span.text, analysis.source.text[: span.start].rstrip().endswith("."))
        text = text or option(analysis.source.text, span.start, span.end, analysis.index.scope(at))
        call = next((c for c in analysis.facts.calls if text and c.span.file == analysis.source
                     and c.name.endswith(f".{span.text}") and c.span.start <= at <= c.span.end), None)
        if call is not None:
            text += "\n\n" + placed(call, costs(analysis))
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
        found = lenses(analysis, server.forecast(analysis))
        return [t.CodeLens(server.range(span), t.Command(text, "")) for span, text in found]

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
        if found is None:
            return None
        tree = found.symbol.tree
        if isinstance(tree, ast.PyFunction) and (place := _in_python(server, found.symbol, tree)) is not None:
            return place
        return server.location(found.symbol.span)

    @feature(t.TEXT_DOCUMENT_SELECTION_RANGE)
    def selection(params: t.SelectionRangeParams) -> list[t.SelectionRange]:
        analysis = server.analysis(params.text_document.uri)
        chosen = []
        for position in params.positions:
            outer: t.SelectionRange | None = None
            for span in reversed(selections(analysis.source, analysis.file, server.offset(analysis, position))):
                outer = t.SelectionRange(server.range(span), outer)
            chosen.append(present(outer, "a selection", "lsp"))
        return chosen

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
        return server.range(found.span) if found is not None and not in_library(found.symbol) else None

    @feature(t.TEXT_DOCUMENT_RENAME, t.RenameOptions(prepare_provider=True))
    def rename(params: t.RenameParams) -> t.WorkspaceEdit | None:
        _, found = server.at(params)
        if found is None:
            return None
        why = refusal(found.symbol, params.new_name, server.indices(found.symbol))
        if why:
            raise JsonRpcInvalidParams(why)
        changes: dict[str, list[t.TextEdit]] = {}
        for o in server.everywhere(found.symbol):
            changes.setdefault(uri_of(o.span.file.name), []).append(t.TextEdit(server.range(o.span), params.new_name))
        return t.WorkspaceEdit(changes)

    @feature(t.WORKSPACE_SYMBOL)
    def workspace(params: t.WorkspaceSymbolParams) -> list[t.SymbolInformation]:
        wanted = params.query.lower()
        return [t.SymbolInformation(server.location(s.span), s.name, SYMBOLS.get(s.kind, t.SymbolKind.Variable))
                for i in server.indices() for s in i.symbols if not s.inside and wanted in s.name.lower()]


def _in_python(server: Server, symbol: Symbol, tree: ast.PyFunction) -> t.Location | None:
    """Where Python defines what a program takes from it; None: no file that can be read does."""
    file = symbol.span.file
    index = server.files.of(file.name, file.text)
    uses = (i for i in index.file.items if isinstance(i, ast.UsePy))
    use = next((u for u in uses if u.span.start <= tree.span.start < u.span.end), None)
    if use is None:
        return None
    own = python_path(file.name, use.path)
    folders = (str(Path(file.name).parent), *(path_of(f.uri) for f in server.workspace.folders.values()), os.getcwd())
    found = defined_at(symbol.name, dict.fromkeys([own, *candidates(use.path, folders)]), server.text_of)
    if found is None:
        return None
    path, line, column = found
    start = t.Position(line, column)
    return t.Location(uri_of(path), t.Range(start, t.Position(line, column + len(symbol.name))))
