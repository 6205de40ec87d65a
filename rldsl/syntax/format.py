"""The one way to write a program: `rlc fmt`.

In: the text of a program that parses. Out: the same program in canonical form. The invariants, checked on each result:
the tree is the same (but for spans and docs), every comment is there in the same order, and formatting the result
changes nothing.

The form:

- Two spaces for each block; one around `=` of a binding and around operators, none inside brackets, none around the
  `=` of an argument or option. Numbers and strings stay as written. A block that was written on one line stays so.
- At most one blank line, where there was one; none at the edges of a block or of the file.
- Only the brackets that precedence needs. No trailing commas.
- In a paragraph (one-line statements without a blank line, a comment line or a block between them), each stretch of
  lines of one kind (assignments, calls, params, models, ...) is aligned at what they have in common: `=`, the `train`
  of models and the `on` of placement rules one space after the longest line that has it, the clause of calls three
  spaces. So are the comments at the ends of all lines of the paragraph, two spaces after.
- Lines have 100 columns. The clause of a call and a comment at the end stand in the margin and do not count: the
  algorithm keeps its shape whatever the placement. A longer line is broken inside its widest bracket: each line takes
  as many arguments as it holds, the second and later ones indented by four; an argument that is too long for a line is
  broken before its loosest operators, or else again inside its widest bracket. Brackets round a whole value stay if the
  line would be too long without them; what has no brackets is not broken. In a bracket with comments each argument has
  its own line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import groupby, pairwise
from typing import Any

from rldsl.source import SourceFile
from rldsl.syntax.lossless import INDENT, WIDTH, Line, comments, flat, gap, lines, needed
from rldsl.syntax.parse import parse
from rldsl.syntax.printer import print_line

_INSIDE = ("", "=", "train")  # the marks of what counts for the width
_MARKS = ("=", "train", "place", "on", "#")  # in the order in which they stand on a line


class NotTheSame(Exception):
    """An error of the formatter: its result is another program."""


def format(source: SourceFile) -> str:
    """The program in canonical form. Raises Failure with the syntax errors of a text that does not parse."""
    tree = parse(source)
    text = (source.text + "\n").replace("\r\n", "\n")
    result = "".join(f"{row}\n" for row in _rows(lines(text)))
    again = SourceFile(source.name, result)
    if shape(parse(again)) != shape(tree) or _said(result) != _said(text):
        raise NotTheSame(f"formatting {source.name} would change its meaning; nothing was written")
    return result


def _said(text: str) -> list[str]:
    return [comment for _, comment in comments(text)]


def shape(node: Any) -> Any:
    """A tree as nested tuples without spans and docs: equal if two programs mean the same."""
    if is_dataclass(node) and not isinstance(node, type):
        inner = (getattr(node, f.name) for f in fields(node) if f.name not in ("span", "doc", "source"))
        return type(node).__name__, *map(shape, inner)
    return tuple(map(shape, node)) if isinstance(node, tuple) else node


@dataclass(frozen=True, slots=True)
class _Row:
    """A line as it is printed: with `texts`, or with `cells`."""

    line: Line  # the line
    texts: tuple[str, ...] = ()  # of a line that is not aligned: what it is broken into, the first without indentation
    # of a line that is aligned with those around it: (mark, gap before, text) from each mark to the next, the first
    # with mark ""
    cells: tuple[tuple[str, int, str], ...] = ()


def _rows(found: tuple[Line, ...]) -> Iterator[str]:
    """The text, row by row."""
    for rows in _paragraphs(map(_row, found)):
        if rows[0].line.blank:
            yield ""
        first, *more = _aligned(rows) if rows[0].cells else rows[0].texts
        indent = " " * (INDENT * rows[0].line.depth)
        yield indent + first
        yield from (indent + text for text in more) if rows[0].cells else more


def _row(line: Line) -> _Row:
    if line.kind == "comment":
        return _Row(line, (line.comment,))
    texts = print_line(line)
    words = needed(line.words)
    if len(texts) > 1 or line.kind == "close" or words[-1].text == "{":
        return _Row(line, (*texts[:-1], f"{texts[-1]}  {line.comment}".rstrip()))
    starts = [0, *(i for i, w in enumerate(words) if w.mark), len(words)]
    cells = [(words[a].mark, gap(words[a - 1], words[a]) if a else 0, flat(words[a:b]))
             for a, b in pairwise(starts)]
    return _Row(line, (), (*cells, *([("#", 2, line.comment)] if line.comment else [])))


def _paragraphs(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Rows that are aligned with each other; every other row alone."""
    paragraph: list[_Row] = []
    for row in rows:
        if paragraph and not (row.cells and paragraph[-1].cells and not row.line.blank):
            yield paragraph
            paragraph = []
        paragraph.append(row)
    if paragraph:
        yield paragraph


def _aligned(rows: list[_Row]) -> list[str]:
    """The texts of one paragraph, mark by mark from the left."""
    texts = [row.cells[0][2] for row in rows]
    widths = [sum(gap + len(text) for mark, gap, text in row.cells if mark in _INSIDE) for row in rows]
    room = WIDTH - INDENT * rows[0].line.depth
    for mark in _MARKS:
        for _, stretch in groupby(range(len(rows)), key=lambda i: rows[i].line.kind if mark != "#" else ""):
            cells = {i: (gap, text) for i in stretch for found, gap, text in rows[i].cells if found == mark}
            longest = max((len(texts[i]) for i in cells), default=0)
            more = {i: longest - len(texts[i]) for i in cells}
            if mark in _INSIDE and any(widths[i] + more[i] > room for i in cells):
                more = dict.fromkeys(cells, 0)
            for i, (before, text) in cells.items():
                texts[i] += " " * (more[i] + before) + text
                widths[i] += more[i]
    return texts
