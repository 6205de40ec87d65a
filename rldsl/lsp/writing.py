"""What helps while a text is being written: completion, signatures, formatting, and fixes of mistakes.

In: a Server, and how it takes a handler. Out: nothing; its handlers answer with what fits at a place, or with edits.
"""

from __future__ import annotations

import re

from lsprotocol import types as t

from rldsl.diag import Failure
from rldsl.lsp.complete import Item, call_at, complete
from rldsl.lsp.describe import signature, word
from rldsl.lsp.edits import line_edits
from rldsl.lsp.session import Feature, Server, diagnostic
from rldsl.lsp.text import Lines
from rldsl.source import Span

KINDS = {"keyword": t.CompletionItemKind.Keyword, "function": t.CompletionItemKind.Function,
         "method": t.CompletionItemKind.Method, "variable": t.CompletionItemKind.Variable,
         "option": t.CompletionItemKind.Property, "field": t.CompletionItemKind.Field,
         "module": t.CompletionItemKind.Module, "class": t.CompletionItemKind.Class,
         "level": t.CompletionItemKind.EnumMember}

# keyword -> what it begins, as editors write forms: ${1:text} is the first part to fill in
SNIPPETS = {
    "param": "param ${1:name} = ${2:value}",
    "data": "data ${1:prompts} = jsonl(${2:\"data/prompts.jsonl\"}, batch=${3:64})",
    "model": "model ${1:actor} = causal_lm(${2:\"models/sft\"}) train adamw(lr=${3:1e-6})",
    "flow": "flow ${1:name}(steps=${2:500}, seed=1) {\n  prompt = ${3:prompts}.next()\n  $0\n}",
    "fn": "fn ${1:name}(${2:r: seq}) -> ${3:seq} {\n  return $0\n}",
    "loss": "loss ${1:name}(logprobs: token; old: token, adv: token) {\n  ratio = exp(logprobs - old)\n"
            "  return ${0:mean(-adv * ratio)}\n}",
    "eval": "eval ${1:data} {\n  $0\n}",
    "every": "every ${1:100} { save ${2:actor} }",
    "checkpoint": "checkpoint every ${1:50} keep=${2:2}",
    "place": "place ${1:actor.generate} on mesh(${2:0:8}) dp=${3:8}",
}


def writing(server: Server, feature: Feature) -> None:
    """Register the handlers."""

    @feature(t.TEXT_DOCUMENT_COMPLETION, t.CompletionOptions(trigger_characters=[".", " ", "("]))
    def completion(params: t.CompletionParams) -> list[t.CompletionItem]:
        analysis = server.analysis(params.text_document.uri)
        at = server.offset(analysis, params.position)
        found = complete(analysis.source.text, at, analysis.index, analysis.facts, server.files)
        lines = server.lines(analysis.source)
        items = [_item(i, n, lines) for n, i in enumerate(dict.fromkeys(found))]
        keywords = [i.text for i in found if i.kind == "keyword" and i.text in SNIPPETS]
        return items + [_snippet(word) for word in keywords if _takes_snippets(server)]

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
        return [t.TextEdit(server.range(Span(analysis.source, start, end)), new)
                for start, end, new in line_edits(analysis.source.text, text)]

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


def _takes_snippets(server: Server) -> bool:
    writes = server.client_capabilities.text_document
    item = writes.completion.completion_item if writes is not None and writes.completion is not None else None
    return item is not None and bool(item.snippet_support)


def _snippet(word: str) -> t.CompletionItem:
    return t.CompletionItem(f"{word} ...", kind=t.CompletionItemKind.Snippet, detail="a form to fill in",
                            filter_text=word, sort_text=f"zz{word}", insert_text=SNIPPETS[word],
                            insert_text_format=t.InsertTextFormat.Snippet)


def _item(i: Item, n: int, lines: Lines) -> t.CompletionItem:
    at = [(t.Position(*lines.position(offset)), text) for offset, text in i.more]
    return t.CompletionItem(i.text, kind=KINDS[i.kind], detail=i.detail or None, documentation=i.doc or None,
                            sort_text=f"{n:04}", insert_text=i.text,
                            additional_text_edits=[t.TextEdit(t.Range(p, p), text) for p, text in at] or None)


def _meets(a: t.Range, b: t.Range) -> bool:
    return (a.start.line, a.start.character) <= (b.end.line, b.end.character) \
        and (b.start.line, b.start.character) <= (a.end.line, a.end.character)
