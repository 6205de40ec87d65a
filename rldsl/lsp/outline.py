"""The shape of a file: what it declares, and what folds. In: an index or a text. Out: nodes, ranges of lines."""

from __future__ import annotations

from dataclasses import dataclass

from rldsl.lsp.index import Index, Symbol
from rldsl.source import SourceFile, Span
from rldsl.syntax.recover import visible


@dataclass(frozen=True, slots=True)
class Node:
    """An entry of the outline."""

    symbol: Symbol                   # the declaration
    span: Span                       # of the whole declaration
    children: tuple[Node, ...] = ()  # what is bound inside it


def outline(index: Index) -> list[Node]:
    """Declarations in their order; below a flow its values and metrics."""
    top = [s for s in index.symbols if not s.inside]
    return [Node(s, s.tree.span, tuple(Node(c, _whole(c), ()) for c in index.symbols
                                       if c.inside == s.name and c.kind in ("value", "metric") and s.kind == "flow"))
            for s in sorted(top, key=lambda s: s.span.start)]


def _whole(symbol: Symbol) -> Span:
    span = symbol.tree.span
    return span if span.start <= symbol.span.start and symbol.span.end <= span.end else symbol.span


def folds(text: str) -> list[tuple[int, int, bool]]:
    """(first line, last line, is a comment), lines from 0: blocks, brackets over several lines, runs of comments."""
    out: list[tuple[int, int, bool]] = []
    stack: list[int] = []
    line = 0
    for c in visible(text):
        if c in "{([":
            stack.append(line)
        elif c in "})]" and stack:
            first = stack.pop()
            if line > first:
                out.append((first, line - 1 if c == "}" else line, False))
        line += c == "\n"
    rows, start = text.split("\n"), None
    for n, row in enumerate([*rows, ""]):
        if row.lstrip().startswith("#"):
            start = n if start is None else start
        else:
            if start is not None and n - start > 1:
                out.append((start, n - 1, True))
            start = None
    return sorted(out)


def word_at(source: SourceFile, offset: int) -> Span:
    """The word around an offset, perhaps empty."""
    left = right = offset
    while left and (source.text[left - 1].isalnum() or source.text[left - 1] == "_"):
        left -= 1
    while right < len(source.text) and (source.text[right].isalnum() or source.text[right] == "_"):
        right += 1
    return Span(source, left, right)
