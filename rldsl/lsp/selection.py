"""What an editor selects next when a selection grows: the word, then the parts of the program around it.

In: a syntax tree and an offset. Out: ranges, each inside the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

from rldsl.lsp.outline import word_at
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast


def selections(source: SourceFile, file: ast.File, offset: int) -> list[Span]:
    """From the word at the offset to the whole text; in a broken text, what of the tree there is."""
    word = word_at(source, offset)
    around = [s for item in file.items for s in _spans(item, offset) if s.file == source]
    found: list[Span] = [word] if word.start < word.end else []
    for span in (*sorted(around, key=lambda s: s.end - s.start), Span(source, 0, len(source.text))):
        inner = found[-1] if found else None
        if inner is None or span.start <= inner.start and inner.end <= span.end and \
                (span.start, span.end) != (inner.start, inner.end):
            found.append(span)
    return found


def _spans(tree: ast.Tree, offset: int) -> Iterator[Span]:
    if not tree.span.start <= offset <= tree.span.end:
        return
    yield tree.span
    for name in tree.__dataclass_fields__:
        value = getattr(tree, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, ast.Tree):
                yield from _spans(item, offset)
