"""One logical line -> lines of text: where it breaks when it is too long or holds comments.

In: a `Line` of `lossless.py`. Out: its text, the first line without indentation. The invariant: the tokens and
comments come out in order, and the text depends on nothing else, so that printing what was printed changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rldsl.diag import present
from rldsl.syntax.lossless import INDENT, WIDTH, Comment, Line, Word, flat, gap, needed

HANG = 4  # indentation of what is inside a broken bracket
WORTH = 24  # columns of the narrowest bracket that is broken because its line is too long
_OPERATORS = ("or_expr", "and_expr", "comparison", "sum", "product")  # loosest first: where a long argument breaks


@dataclass(frozen=True, slots=True)
class Group:
    """A pair of brackets."""

    opening: Word                         # the opening bracket
    items: tuple[tuple[Piece, ...], ...]  # what is between its commas, each with the comma after it
    closing: Word                         # the closing bracket


Piece = Word | Group


def print_line(line: Line) -> list[str]:
    """The lines of text: more than one only if the line is too long or has comments in its brackets."""
    indent = INDENT * line.depth
    words = needed(line.words)
    long = indent + len(flat(words[: margin(words)])) > WIDTH
    if not long and not commented(words):
        return [flat(words)]
    text = _Text(indent)
    pieces = group(line.words if long else words)
    text.put(pieces[: margin(pieces)], indent, 0)
    text.put(pieces[margin(pieces) :], indent, None)
    return text.lines


def margin(pieces: Sequence[Piece]) -> int:
    """Where the placement clause begins."""
    return next((i for i, p in enumerate(pieces) if isinstance(p, Word) and p.mark in ("on", "place")), len(pieces))


def commented(words: Sequence[Word]) -> bool:
    return any(w.comments for w in words)


def group(words: Sequence[Word]) -> tuple[Piece, ...]:
    """The words, with matching brackets and what is between them as `Group`s."""
    return tuple(p for item in _items(iter(words))[0] for p in item)


def _items(words: Iterator[Word]) -> tuple[tuple[tuple[Piece, ...], ...], Word | None]:
    """The items up to the closing bracket, and that bracket."""
    items: list[list[Piece]] = [[]]
    for word in words:
        if word.text in (")", "]"):
            return tuple(tuple(i) for i in items if i), word
        if word.text in ("(", "["):
            inner, closing = _items(words)
            items[-1].append(Group(word, inner, present(closing, f"bracket that closes `{word.text}`")))
        else:
            items[-1].append(word)
            if word.text in (",", ";") and word.rule != "names":
                items.append([])
    return tuple(tuple(i) for i in items if i), None


def _words(pieces: Sequence[Piece]) -> list[Word]:
    found: list[Word] = []
    for piece in pieces:
        if isinstance(piece, Word):
            found.append(piece)
        else:
            found += [piece.opening, *(w for item in piece.items for w in _words(item)), piece.closing]
    return found


def _inside(group: Group) -> bool:
    """Whether there is a comment between the brackets."""
    return commented(_words([group])[:-1])


class _Text:
    """Lines being written."""

    def __init__(self, indent: int):
        self.lines: list[str] = [""]
        self.left = indent  # columns before the first line
        self.last: Word | None = None  # on this line
        self.ended = False  # by a comment

    @property
    def column(self) -> int:
        return len(self.lines[-1]) + (self.left if len(self.lines) == 1 else 0)

    def new(self, indent: int) -> None:
        self.lines.append(" " * indent)
        self.last, self.ended = None, False

    def word(self, word: Word, indent: int) -> None:
        """indent: of the line that begins here if a comment ended the one before."""
        if self.ended:
            self.new(indent)
        self.lines[-1] += (" " * gap(self.last, word) if self.last else "") + word.text
        self.last = word
        for comment in word.comments:
            self.comment(comment, indent)

    def comment(self, comment: Comment, indent: int) -> None:
        if comment.own:
            self.new(indent)
        self.lines[-1] += comment.text if comment.own else f"  {comment.text}"
        self.ended = True

    def put(self, pieces: Sequence[Piece], indent: int, after: int | None) -> None:
        """Pieces on the current line. Where they are too long with the `after` columns that follow (None: in the margin
        nothing is), the widest bracket is broken; brackets with comments always are. indent: of the line so far."""
        fits = after is None or self.column + len(flat(_words(pieces))) + after <= WIDTH
        groups = [] if fits else [p for p in pieces if isinstance(p, Group) and len(flat(_words([p]))) >= WORTH]
        widest = max(groups, key=lambda g: len(flat(_words([g]))), default=None)
        for i, piece in enumerate(pieces):
            if isinstance(piece, Word):
                self.word(piece, indent)
            elif piece is widest or _inside(piece):
                self.broken(piece, indent, (after or 0) + len(flat(_words(pieces[i + 1 :]))))
            else:
                for word in _words([piece]):
                    self.word(word, indent)

    def broken(self, group: Group, indent: int, after: int) -> None:
        """As many items on a line as it holds. An item that is too long for one, and every item of a bracket with
        comments, has its own lines."""
        inner = indent + HANG
        apart = False
        self.word(group.opening, inner)
        for i, item in enumerate(group.items):
            rest = after + 1 if i + 1 == len(group.items) else 0
            width = len(flat(_words(item))) + rest
            tall = _inside(group) or inner + width > WIDTH
            if apart or tall or self.column + (i > 0) + width > WIDTH:
                self.new(inner)
            self.item(item, inner, rest)
            apart = tall
        self.word(group.closing, indent)

    def item(self, item: Sequence[Piece], indent: int, after: int) -> None:
        """One argument; too long, it is broken before its loosest operators, if it has any outside brackets."""
        rules = {p.rule for p in item if isinstance(p, Word)}
        loosest = next((rule for rule in _OPERATORS if rule in rules), None)
        if indent + len(flat(_words(item))) + after <= WIDTH or loosest is None:
            self.put(item, indent, after)
            return
        starts = [0, *(i for i, p in enumerate(item) if isinstance(p, Word) and p.rule == loosest), len(item)]
        for start, stop in pairwise(starts):
            if start:
                self.new(indent)
            self.put(item[start:stop], indent, after if stop == len(item) else 0)
