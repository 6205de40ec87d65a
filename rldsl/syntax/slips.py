"""What parses and yet is surely a mistake, reported as a syntax error before anything is looked up.

In: a syntax tree. Out: diagnostics. The grammar takes `f(x) dp=4` as a placement without `on`, `a == b` as a statement
and `f(n: 4)` as a range; what people meant by them in other places is said here.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from rldsl.diag import Diagnostic, Fix
from rldsl.source import Span
from rldsl.syntax import ast
from rldsl.syntax.errors import FOREIGN, PLACEMENT


def slips(file: ast.File) -> tuple[Diagnostic, ...]:
    """The diagnostics, in the order of the text."""
    return tuple(d for node in ast.walk(file.items) for d in _of(node))


def _of(node: ast.Tree) -> Iterator[Diagnostic]:
    match node:
        case ast.Do(value=ast.Binary(op="==", left=ast.Name() | ast.Attribute() as left, right=right)):
            at = left.span.end + node.span.file.text[left.span.end : right.span.start].find("==")
            span = Span(node.span.file, at, at + 2)
            yield Diagnostic("RL0001", "unexpected `==`", span, "the result of this comparison is unused",
                             help="`=` assigns; `==` compares", fix=Fix(((span, "="),)))
        case ast.Do(clause=ast.Clause(mesh=None, options=(first, *_))) | ast.Assign(
                clause=ast.Clause(mesh=None, options=(first, *_))) if not _placement(first):
            word = node.value.name if isinstance(node, ast.Do) and isinstance(node.value, ast.Name) else ""
            if word in FOREIGN:
                head = Span(node.span.file, node.span.start, first.span.start)
                yield Diagnostic("RL0001", f"unexpected `{word}`", node.value.span, "expected a statement",
                                 help=f"there is no `{word}`: {FOREIGN[word]}", fix=Fix(((head, ""),)))
            else:
                yield Diagnostic("RL0001", f"unexpected `{first.name.name}`", first.name.span,
                                 "expected the end of the line", help="write each statement on its own line")
        case ast.Call(func=func, args=args) if not (isinstance(func, ast.Name) and func.name == "mesh"):
            for arg in args:
                if isinstance(arg.value, ast.Range) and isinstance(arg.value.start, ast.Name) and arg.name is None:
                    yield _colon(arg.value, arg.value.start)


def _colon(range_: ast.Range, name: ast.Name) -> Diagnostic:
    text = range_.span.file.text
    at = text.index(":", name.span.end)
    fix = Fix(((Span(range_.span.file, name.span.end, range_.stop.span.start), "="),))
    return Diagnostic("RL0001", "unexpected `:`", Span(range_.span.file, at, at + 1),
                      "a range belongs in `mesh(...)`", help=f"an option is written `{name.name}=...`",
                      fix=fix if "#" not in text[name.span.end : range_.stop.span.start] else None)


def _placement(option: ast.Option) -> bool:
    """An option of a placement, or one that is misspelt: that has its own message."""
    name = option.name.name
    return name in PLACEMENT or (len(name) > 1 and bool(get_close_matches(name, PLACEMENT, n=1, cutoff=0.7)))
