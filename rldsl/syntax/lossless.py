"""Source text -> logical lines of tokens, with every comment: what the formatter prints from.

In: text that parses. Out: `Line`s in source order. The invariant: the tokens and comments of all lines together are
those of the text, except brackets and trailing commas that the tree does not need. A logical line is a statement or a
declaration, up to the `{` of a block that is on separate lines; its `}` begins another.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from lark import Lark, Token, Tree

from rldsl.syntax.build import token_offsets
from rldsl.syntax.parse import _FreeNewlines, grammar

INDENT = 2
WIDTH = 100  # columns, without the margin: a placement clause and the comment at the end of the line
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|(?P<comment>#[^\n]*)')
_BINDING = {"assign", "param", "state", "buffer", "mesh_decl", "data_decl", "model_decl", "metric", "metric_hist",
            "metric_table"}
# How tightly an expression binds, and what its operands must reach to stand there without brackets. A number reaches
# everything but the places where more digits or a unit could be read into it: `(1).x`, `dp=(3) tokens=4`.
_BINDS = {"or_expr": 0, "and_expr": 1, "not_expr": 2, "comparison": 3, "sum": 4, "product": 5, "negative": 6,
          "power": 7, "number": 8}
_TIGHTEST = 9
_OPERANDS = {"or_expr": (0, 1), "and_expr": (1, 2), "not_expr": (2,), "comparison": (4, 4), "sum": (4, 5),
             "product": (5, 6), "negative": (6,), "power": (8, 6), "call": (8,), "attribute": (9,), "option": (9,),
             "metric_option": (6,), "clause": (9,)}


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment of the program."""

    text: str  # with its `#`
    own: bool  # whether it is alone on its line


@dataclass(frozen=True, slots=True)
class Word:
    """One token."""

    text: str  # as written
    rule: str  # the grammar rule that it belongs to
    start: int  # offset in the text
    end: int  # offset after it
    # what begins here and is aligned with the lines around: "=", "train", "place" (the clause of a place rule), "on"
    # (the clause of a call) or ""
    mark: str = ""
    spare: bool = False  # a bracket that only matters when the line is broken
    comments: tuple[Comment, ...] = ()  # those between it and the next token of the line


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the formatted program."""

    kind: str  # the rule of the statement, "close" for a line that begins with `}`, "comment" for a whole-line comment
    depth: int  # of indentation
    words: tuple[Word, ...] = ()  # its tokens
    blank: bool = False  # whether an empty line comes before it
    comment: str = ""  # the one at its end


@lru_cache(maxsize=1)
def _parser() -> Lark:
    return Lark(grammar(), parser="lalr", keep_all_tokens=True, maybe_placeholders=False, postlex=_FreeNewlines())


def lines(text: str) -> tuple[Line, ...]:
    """text: parses without errors, with "\\n" as its only line end, and has one at its end."""
    found = comments(text)
    items = (i for i in _parser().parse(text).children if isinstance(i, Tree))
    reader = _Reader(text, [at for at, _ in found])
    drafts = [draft for item in items for draft in reader.statement(item, 0)]
    return tuple(_commented(text, drafts, found))


def comments(text: str) -> list[tuple[int, str]]:
    """(offset, text without the space at its end) of every comment."""
    return [(m.start(), m["comment"].rstrip()) for m in _COMMENT.finditer(text) if m["comment"]]


def gap(left: Word, right: Word) -> int:
    """Spaces between two tokens of one line."""
    if right.mark == "on":
        return 3
    if left.rule == "number" and right.text == ".":
        return 1  # `1 ._5` is not `1._5`
    near = (left.text in ("(", "[", ".") or right.text in (")", "]", ",", ";", ".", ":", "?")
            or left.text == ":" and left.rule == "range"
            or any(w.text == "=" and w.rule in ("argument", "option", "metric_option") for w in (left, right))
            or left.text == "-" and left.rule == "negative" or left.rule == right.rule == "selector"
            or right.text == "(" and right.rule in ("call", "fn_decl", "loss_decl", "flow", "py_function")
            or left.text == "{" and right.text == "}")
    return 0 if near else 1


def flat(words: tuple[Word, ...] | list[Word]) -> str:
    """The tokens on one line, without comments."""
    parts = [words[0].text] if words else []
    for left, right in pairwise(words):
        parts += [" " * gap(left, right), right.text]
    return "".join(parts)


def needed(words: list[Word] | tuple[Word, ...]) -> tuple[Word, ...]:
    return tuple(w for w in words if not w.spare)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A line before it gets its comments."""

    kind: str                # as in `Line`
    depth: int               # of indentation
    words: tuple[Word, ...]  # its tokens


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the lossless tree into drafts."""

    text: str            # of the program
    comments: list[int]  # their offsets, ascending

    def statement(self, tree: Tree[Token], depth: int) -> Iterator[_Draft]:
        """One draft, or those of its head, its block and the rest."""
        parts: list[list[Word]] = [[]]  # before and after the block
        block = None
        for child in self._children(tree):
            if isinstance(child, Tree) and child.data == "block":
                block = child
                parts.append([])
            else:
                parts[-1] += self._part(tree.data, child)
        if block is None:
            yield _Draft(tree.data, depth, _trimmed(parts[0]))
            return
        opening, body, closing = self._block(block)
        inside = self._one_line(opening, body, closing)
        whole = _trimmed([*parts[0], *inside, *parts[1]])
        if inside and (not body or INDENT * depth + len(flat(needed(whole))) <= WIDTH):
            yield _Draft(tree.data, depth, whole)
            return
        yield _Draft(tree.data, depth, _trimmed([*parts[0], opening]))
        for statement in body:
            yield from self.statement(statement, depth + 1)
        yield _Draft("close", depth, _trimmed([closing, *parts[1]]))

    def _part(self, kind: str, child: Word | Tree[Token]) -> list[Word]:
        """The tokens of a child of a statement of this kind."""
        if isinstance(child, Word):
            return [child]
        first, *more = self._words(child, 0, kind == "do")
        if child.data in ("clause", "auto"):
            first = replace(first, mark="place" if kind == "place" else "on")
        return [first, *more]

    def _one_line(self, opening: Word, body: list[Tree[Token]], closing: Word) -> list[Word]:
        """The tokens of a block that may stay on the line of its `{`: it is empty or was written so. Else none."""
        text = self.text[opening.end : closing.start]
        if "\n" in text and (body or "#" in text):
            return []
        drafts = [draft for statement in body for draft in self.statement(statement, 0)]
        inside = (replace(word, mark="") for draft in drafts for word in draft.words)
        return [opening, *inside, closing] if len(drafts) < 2 else []

    def _words(self, tree: Tree[Token], need: int, first: bool = False) -> Iterator[Word]:
        """The tokens of an expression, a clause, ... need: how tightly it must bind to stand here without brackets.
        first: it begins a statement, where a name without brackets could be read as a keyword."""
        if tree.data == "paren":
            opening, (inner,), closing = self._block(tree)
            bare = inner
            while bare.data == "paren":
                bare = next(c for c in bare.children if isinstance(c, Tree))
            at = bisect_left(self.comments, opening.start)
            commented = at < len(self.comments) and self.comments[at] < closing.start
            spare = not (commented or first) and _BINDS.get(bare.data, _TIGHTEST) >= need
            yield replace(opening, spare=spare)
            yield from self._words(inner, need if spare else 0)
            yield replace(closing, spare=spare)
            return
        needs = iter(_OPERANDS.get(tree.data, ()))
        for child in self._children(tree):
            if isinstance(child, Word):
                yield child
            else:
                yield from self._words(child, next(needs, 0), first)
            first = False

    def _block(self, tree: Tree[Token]) -> tuple[Word, list[Tree[Token]], Word]:
        """The opening bracket, what is between, and the closing bracket."""
        children = list(self._children(tree))
        words = [c for c in children if isinstance(c, Word)]
        return words[0], [c for c in children if isinstance(c, Tree)], words[-1]

    def _children(self, tree: Tree[Token]) -> Iterator[Word | Tree[Token]]:
        """The children without newlines; tokens become Words."""
        for child in tree.children:
            if isinstance(child, Tree):
                yield child
            elif child.type != "_NL":
                mark = "=" if child.type == "EQUAL" and tree.data in _BINDING else ""
                mark = "train" if child.type == "TRAIN" else mark
                yield Word(str(child), tree.data, *token_offsets(child), mark)


def _trimmed(words: list[Word]) -> tuple[Word, ...]:
    """The words without trailing commas, and without spare brackets in brackets: newlines are free there anyway."""
    kept: list[Word] = []
    around: list[bool] = []  # for each bracket that is open here: whether it stays
    for word, after in zip(words, [*words[1:], None], strict=True):
        stays = word.text != "," or after is None or after.text not in (")", "]", ";")
        if word.text in ("(", "["):
            stays = not (word.spare and any(around))
            around.append(stays)
        elif word.text in (")", "]"):
            stays = around.pop()
        if stays:
            kept.append(word)
    return tuple(kept)


def _commented(text: str, drafts: list[_Draft], comments: list[tuple[int, str]]) -> list[Line]:
    """drafts with the comments between and in them; comments: (offset, text)."""
    done: list[Line] = []
    left, end = list(reversed(comments)), 0

    def blank(start: int) -> bool:
        opened = done and done[-1].words and done[-1].words[-1].text == "{"
        return bool(done) and not opened and text.count("\n", end, start) > 1

    for draft in [*drafts, _Draft("close", -1, ())]:
        start = draft.words[0].start if draft.words else len(text)
        while left and left[-1][0] < start:
            at, body = left.pop()
            if text[text.rfind("\n", 0, at) + 1 : at].strip():
                done[-1] = replace(done[-1], comment=body)
            else:
                done.append(Line("comment", draft.depth + (draft.kind == "close"), (), blank(at), body))
            end = at + len(body)
        if draft.words:
            inside = []
            while left and left[-1][0] < draft.words[-1].start:
                inside.append(left.pop())
            words = _attached(text, draft.words, inside)
            done.append(Line(draft.kind, draft.depth, words, draft.kind != "close" and blank(start)))
            end = draft.words[-1].end
    return done


def _attached(text: str, words: tuple[Word, ...], comments: list[tuple[int, str]]) -> tuple[Word, ...]:
    """Each comment with the word before it, or with the comma that follows: only the first can share its line."""
    found: dict[int, list[Comment]] = {}
    for at, body in comments:
        index = max(i for i, w in enumerate(words) if w.start < at)
        index += words[index + 1].text in (",", ";")
        own = index in found or not text[text.rfind("\n", 0, at) + 1 : at].strip()
        found.setdefault(index, []).append(Comment(body, own))
    return tuple(replace(w, comments=tuple(found[i])) if i in found else w for i, w in enumerate(words))
