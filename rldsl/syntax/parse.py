"""Source text -> `ast.File`, or every syntax error in it.

After an error the text is parsed again without the faulty statement (`recover.py`), so that one run reports all of
them and one mistake gives one message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from pathlib import Path

from lark import Lark, Token
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError
from lark.lark import PostLex

from rldsl.diag import Diagnostic, Failure
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast, table
from rldsl.syntax.build import build
from rldsl.syntax.errors import DECLARATIONS, explain, too_deep, unclosed_block, unclosed_bracket
from rldsl.syntax.recover import blank, blank_lines, first_in_a_block, open_brackets, unclosed, unclosed_brace, visible

MAX_ERRORS = 20
KEPT = 64  # trees: of the library's modules, which each program imports again, and of the programs at hand
MAX_DEPTH = 60  # brackets in brackets; far above any program, far below Python's recursion limit
_DECLARATION = re.compile(rf"^({'|'.join(DECLARATIONS)})[ \t]+[\w@*\"]", re.MULTILINE)
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^\n]*\n)+", re.MULTILINE)


def parse(source: SourceFile) -> ast.File:
    """The syntax tree. Raises Failure with all syntax errors found."""
    file, diagnostics = parse_recovering(source)
    if diagnostics:
        raise Failure(diagnostics)
    return file


@lru_cache(maxsize=KEPT)
def parse_recovering(source: SourceFile) -> tuple[ast.File, tuple[Diagnostic, ...]]:
    """The tree of what could be parsed, and the syntax errors (at most MAX_ERRORS). The same text is parsed once."""
    deep = _too_deep(source)
    if deep is not None:
        return ast.File(source, ()), (deep,)
    text = source.text
    found: list[Diagnostic] = []
    for _ in range(10 * MAX_ERRORS):
        if len(found) == MAX_ERRORS:
            break
        try:
            file = build(_parser().parse(text + "\n"), source, _docs(source.text))
        except UnexpectedInput as error:
            diagnostic, shorter = _diagnose(error, source, text)
            if not _follows(diagnostic, error, found):
                found.append(diagnostic)
            if shorter == text:
                break
            text = shorter
        except (RecursionError, VisitError) as error:  # a very long chain of operators: trees are walked recursively
            if not isinstance(getattr(error, "orig_exc", error), RecursionError):
                raise
            return ast.File(source, ()), (*found, too_deep(Span(source, 0, min(1, len(text)))))
        else:
            return file, tuple(found)
    return ast.File(source, ()), tuple(found)


def _diagnose(error: UnexpectedInput, source: SourceFile, text: str) -> tuple[Diagnostic, str]:
    """The diagnostic, and the text without the faulty statement."""
    position = _position(error, text)
    bracket = unclosed(text, position)
    if bracket is not None:  # the line of the error itself may be all right
        before = text.rfind("\n", 0, position)
        end = before if bracket < before else position
        return unclosed_bracket(Span(source, bracket, bracket + 1), text), blank(text, bracket, end)
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END" or position >= len(text.rstrip())
    brace = unclosed_brace(text, len(text))
    if ended and brace is not None and any(text[i] == "{" for i in open_brackets(text, len(text))):
        sure = [i for i in open_brackets(text, len(text)) if text[i] == "{"] == [brace]
        return unclosed_block(Span(source, brace, brace + 1), None, sure), blank(text, brace, len(text))
    shown = visible(text)
    head = first_in_a_block(shown, _DECLARATION.finditer(shown, 0, position))
    brace = unclosed_brace(text, head.start()) if head else None
    if head and brace is not None:  # a declaration inside a block: the block should have ended before
        message = unclosed_block(Span(source, brace, brace + 1), Span(source, head.start(1), head.end(1)), False)
        return message, blank_lines(text, brace, head.start())
    width = max(1, len(str(getattr(error, "token", "")).split("\n")[0]))
    span = Span(source, position, min(position + width, max(len(text), position + 1)))
    statement = next((i for i in open_brackets(text, position) if text[i] in "(["), position)  # may begin lines above
    return explain(error, span, text), blank(text, statement, position)


def _follows(diagnostic: Diagnostic, error: UnexpectedInput, found: list[Diagnostic]) -> bool:
    """Whether the error is most likely a consequence of those found: after a broken block
    header the body appears at top level, and a file that ends inside a block ends inside all blocks around it."""
    accepted = getattr(error, "accepts", None) or getattr(error, "expected", None) or getattr(error, "allowed", ())
    ended = [d for d in found if d.code == "RL0004" and not d.labels]
    return bool(found) and "FLOW" in (accepted or ()) or bool(ended) and diagnostic.code == "RL0004"


class _FreeNewlines(PostLex):
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


def warm(folder: Path) -> None:
    """Take the parser's tables from `folder`, or put them there, which halves the compiler's start-up time. A
    folder that cannot be read or written changes nothing, and neither does a parser that this process
    already has."""
    if _MADE:
        return
    text = grammar()
    file = folder / f"grammar-{table.key(text)[:16]}.json"
    try:
        # a pipe or a device might never end
        found = table.load(file.read_text("utf-8"), text, _FreeNewlines()) if file.is_file() else None
    except (OSError, UnicodeDecodeError):
        found = None
    if found is not None:
        _MADE.append(found)
        return
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(table.dump(_parser(), text), "utf-8")
        part.replace(file)  # whole or not at all: others may be reading
    except OSError:
        pass


def accepted(before: str) -> tuple[str, ...]:
    """The keywords that may follow a text, by the parser's own state. Broken statements before it are skipped;
    nothing is known inside a string or a comment."""
    text, words = before, []
    for _ in range(MAX_ERRORS):
        parser = _parser().parse_interactive(text)
        try:
            parser.exhaust_lexer()
        except UnexpectedInput as error:
            shorter = _diagnose(error, SourceFile("", text), text)[1]
            if shorter == text:
                return ()
            text = shorter
        else:
            taken = parser.accepts()
            words = [t.pattern.value.partition("(?=")[0] for t in _parser().terminals if t.name in taken]
            break
    return tuple(w for w in words if w.isalpha())


_MADE: list[Lark] = []  # the parser, once there is one: it depends on nothing but the grammar


def _parser() -> Lark:
    if not _MADE:
        _MADE.append(table.make(grammar(), _FreeNewlines()))
    return _MADE[0]


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
