"""What helps while a text is being written: completion, signatures, formatting, and fixes of mistakes.

In: a Server, and how it takes a handler. Out: nothing; its handlers answer with what fits at a place, or with edits.
"""

from __future__ import annotations

import re

from lsprotocol import types as t

from rldsl.diag import Failure
from rldsl.lsp.complete import Item, call_at, complete
from rldsl.lsp.describe import signature, word
from rldsl.lsp.session import Feature, Server, diagnostic
from rldsl.lsp.text import Lines
from rldsl.source import Span

KINDS = {"keyword": t.CompletionItemKind.Keyword, "function": t.CompletionItemKind.Function,
         "method": t.CompletionItemKind.Method, "variable": t.CompletionItemKind.Variable,
         "option": t.CompletionItemKind.Property, "field": t.CompletionItemKind.Field,
         "module": t.CompletionItemKind.Module, "class": t.CompletionItemKind.Class,
         "level": t.CompletionItemKind.EnumMember}


def writing(server: Server, feature: Feature) -> None:
    """Register the handlers."""

    @feature(t.TEXT_DOCUMENT_COMPLETION, t.CompletionOptions(trigger_characters=[".", " ", "("]))
    def completion(params: t.CompletionParams) -> list[t.CompletionItem]:
        analysis = server.analysis(params.text_document.uri)
        at = server.offset(analysis, params.position)
        found = complete(analysis.source.text, at, analysis.index, analysis.facts, server.files)
        lines = server.lines(analysis.source)
        return [_item(i, n, lines) for n, i in enumerate(dict.fromkeys(found))]

    @feature(t.TEXT_DOCUMENT_SIGNATURE_HELP, t.SignatureHelpOptions(trigger_characters=["(", ","]))
    def help_(params: t.SignatureHelpParams) -> t.SignatureHelp | None:
        analysis = server.analysis(params.text_document.uri)
        at = server.offset(analysis, params.position)
        call = call_at(analysis.source.text, at)
        if call is None:
            return None
        symbol = analysis.index.scope(at).get(call.name)
        text, words = signature(symbol) if symbol is not None else ("", ())
        if not words:
            page = word(call.name, False) or word(call.name, True)
            lines = page.splitlines()
            return t.SignatureHelp([t.SignatureInformation(lines[1], "\n".join(lines[4:]))]) if page else None
        names = [re.split(r"[:=\s]", w)[0] for w in words]
        active = names.index(call.option) if call.option in names else min(call.position, len(words) - 1)
        shown = t.SignatureInformation(text, getattr(symbol.tree, "doc", "") if symbol else "",
                                       [t.ParameterInformation(w) for w in words])
        return t.SignatureHelp([shown], 0, active)

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
            out.append(t.CodeAction(d.help or f"fix {d.code}", t.CodeActionKind.QuickFix, [diagnostic(server, d)],
                                    is_preferred=True, edit=t.WorkspaceEdit({params.text_document.uri: edits})))
        return out


def _item(i: Item, n: int, lines: Lines) -> t.CompletionItem:
    at = [(t.Position(*lines.position(offset)), text) for offset, text in i.more]
    return t.CompletionItem(i.text, kind=KINDS[i.kind], detail=i.detail or None, documentation=i.doc or None,
                            sort_text=f"{n:04}", insert_text=i.text,
                            additional_text_edits=[t.TextEdit(t.Range(p, p), text) for p, text in at] or None)


def _meets(a: t.Range, b: t.Range) -> bool:
    return (a.start.line, a.start.character) <= (b.end.line, b.end.character) \
        and (b.start.line, b.start.character) <= (a.end.line, a.end.character)
