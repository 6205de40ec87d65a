"""Source text -> `ast.File`, or every syntax error in it.

Errors recover at the end of the statement: the text is parsed again with the faulty statement blanked out, so that one
run reports all of them and one mistake gives one message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from rldsl.diag import Diagnostic, Failure
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast
from rldsl.syntax.build import build
from rldsl.syntax.errors import explain

MAX_ERRORS = 20
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^\n]*\n)+", re.MULTILINE)


def parse(source: SourceFile) -> ast.File:
    """The syntax tree. Raises Failure with all syntax errors found."""
    file, diagnostics = parse_recovering(source)
    if diagnostics:
        raise Failure(diagnostics)
    return file


def parse_recovering(source: SourceFile) -> tuple[ast.File, tuple[Diagnostic, ...]]:
    """The tree of what could be parsed, and the syntax errors."""
    text, found = source.text, []
    while True:
        try:
            tree = _parser().parse(text + "\n")
        except UnexpectedInput as error:
            start = min(_position(error, text), len(text))
            found.append(explain(error, Span(source, start, start + max(_width(error), 1)), text))
            blanked = _blank_statement(text, start)
            if len(found) == MAX_ERRORS or blanked == text:
                return ast.File(source, ()), tuple(found)
            text = blanked
        else:
            return build(tree, source, _docs(source.text)), tuple(found)


class _FreeNewlines:
    """Newlines count only outside ( ) and [ ]."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth = 0
        for token in stream:
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            if token.type != "_NL" or depth <= 0:
                yield token


@lru_cache(maxsize=1)
def _parser() -> Lark:
    grammar = resources.files("rldsl.grammar").joinpath("rlf.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", propagate_positions=True, maybe_placeholders=True, postlex=_FreeNewlines())


def _position(error: UnexpectedInput, text: str) -> int:
    position = getattr(error, "pos_in_stream", None)
    if isinstance(error, UnexpectedToken) and error.token.type == "$END":
        return len(text.rstrip())
    return len(text) if position is None else position


def _width(error: UnexpectedInput) -> int:
    if isinstance(error, UnexpectedCharacters):
        return 1
    token = getattr(error, "token", "")
    return len(str(token).split("\n")[0])


def _blank_statement(text: str, position: int) -> str:
    """`text` with the line of `position` replaced by blanks, braces kept so that blocks stay closed."""
    start = text.rfind("\n", 0, position) + 1
    stop = text.find("\n", position)
    stop = len(text) if stop < 0 else stop
    line = re.sub(r"[^{}\n]", " ", text[start:stop])
    return text[:start] + line.replace("{", " ").replace("}", " ") + text[stop:]


def _docs(text: str) -> dict[int, str]:
    """Line number after each comment block -> the block's text."""
    return {
        text.count("\n", 0, block.end()) + 1: "\n".join(
            line.strip().removeprefix("#").removeprefix(" ") for line in block.group().splitlines())
        for block in _COMMENT_BLOCK.finditer(text)
    }
