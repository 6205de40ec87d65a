"""Source text -> `ast.File`, or every syntax error in it.

After an error the text is parsed again without the faulty statement (`recover.py`), so that one run reports all of
them and one mistake gives one message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources

from lark import Lark, Token
from lark.exceptions import UnexpectedInput, UnexpectedToken

from rldsl.diag import Diagnostic, Failure
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast
from rldsl.syntax.build import build
from rldsl.syntax.errors import explain, too_deep, unclosed_block, unclosed_bracket
from rldsl.syntax.recover import blank, open_brackets, unclosed, visible

MAX_ERRORS = 20
MAX_DEPTH = 60  # brackets in brackets; far above any program, far below Python's recursion limit
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^\n]*\n)+", re.MULTILINE)


def parse(source: SourceFile) -> ast.File:
    """The syntax tree. Raises Failure with all syntax errors found."""
    file, diagnostics = parse_recovering(source)
    if diagnostics:
        raise Failure(diagnostics)
    return file


def parse_recovering(source: SourceFile) -> tuple[ast.File, tuple[Diagnostic, ...]]:
    """The tree of what could be parsed, and the syntax errors (at most MAX_ERRORS)."""
    deep = _too_deep(source)
    if deep is not None:
        return ast.File(source, ()), (deep,)
    text, found = source.text, []
    for _ in range(10 * MAX_ERRORS):
        if len(found) == MAX_ERRORS:
            break
        try:
            file = build(_parser().parse(text + "\n"), source, _docs(source.text))
        except UnexpectedInput as error:
            diagnostic, start, position = _diagnose(error, source, text)
            if not (found and _between_declarations(error)):  # a broken head leaves its whole block out in the open
                found.append(diagnostic)
            shorter = blank(text, start, position)
            if shorter == text:
                break
            text = shorter
        except RecursionError:  # a very long chain of operators: the tree is walked recursively
            return ast.File(source, ()), (*found, too_deep(Span(source, 0, min(1, len(text)))))
        else:
            return file, tuple(found)
    return ast.File(source, ()), tuple(found)


def _diagnose(error: UnexpectedInput, source: SourceFile, text: str) -> tuple[Diagnostic, int, int]:
    """The message, and the range of text whose lines are at fault."""
    position = _position(error, text)
    bracket = unclosed(text, position)
    if bracket is not None:  # the line of the error itself may be all right
        before = text.rfind("\n", 0, position)
        end = before if bracket < before else position
        return unclosed_bracket(Span(source, bracket, bracket + 1)), bracket, end
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END" or position >= len(text.rstrip())
    braces = [i for i in open_brackets(text, len(text)) if text[i] == "{"]
    if ended and braces:
        return unclosed_block(Span(source, braces[-1], braces[-1] + 1)), braces[-1], len(text)
    width = max(1, len(str(getattr(error, "token", "")).split("\n")[0]))
    span = Span(source, position, min(position + width, max(len(text), position + 1)))
    statement = next((i for i in open_brackets(text, position) if text[i] in "(["), position)  # may begin lines above
    return explain(error, span, text), statement, position


def _between_declarations(error: UnexpectedInput) -> bool:
    accepted = getattr(error, "accepts", None) or getattr(error, "expected", None) or getattr(error, "allowed", ())
    return "FLOW" in (accepted or ())


class _FreeNewlines:
    """Newlines count only outside ( ) and [ ]."""

    always_accept = ("_NL",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth = 0
        for token in stream:
            if token.type in ("LBRACE", "RBRACE"):
                depth = 0
            depth += (token.type in ("LPAR", "LSQB")) - (token.type in ("RPAR", "RSQB"))
            if token.type != "_NL" or depth <= 0:
                yield token


def grammar() -> str:
    return resources.files("rldsl.grammar").joinpath("rlf.lark").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _parser() -> Lark:
    return Lark(grammar(), parser="lalr", propagate_positions=True, maybe_placeholders=True, postlex=_FreeNewlines())


def _position(error: UnexpectedInput, text: str) -> int:
    position = getattr(error, "pos_in_stream", None)
    if position is None or isinstance(error, UnexpectedToken) and error.token.type == "$END":
        position = len(text)
    return min(position, max(len(text.rstrip()) - 1, 0)) if position >= len(text) else position


def _too_deep(source: SourceFile) -> Diagnostic | None:
    """Brackets in brackets, found before parsing so that the message can point at them."""
    depth = 0
    for i, c in enumerate(visible(source.text)):
        depth += (c in "([{") - (c in ")]}")
        if depth > MAX_DEPTH:
            return too_deep(Span(source, i, i + 1))
    return None


def _docs(text: str) -> dict[int, str]:
    """Line number after each comment block -> the block's text."""
    return {
        text.count("\n", 0, block.end()) + 1: "\n".join(
            line.strip().removeprefix("#").removeprefix(" ") for line in block.group().splitlines())
        for block in _COMMENT_BLOCK.finditer(text)
    }
