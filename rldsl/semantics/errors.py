"""Collecting diagnostics: a mistake is reported once, becomes BAD, and everything made from BAD stays silent."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from rldsl.diag import Diagnostic, Failure, Label
from rldsl.source import Span


class Bad:
    """The error type."""

    __slots__ = ()


BAD: Final = Bad()


def suggest(name: str, known: Iterable[str]) -> str:
    """Advice for a misspelt name: the nearest known one, or the whole list when it is short."""
    names = sorted(set(known))
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean `{near[0]}`?"
    return f"known here: {', '.join(names)}" if 0 < len(names) <= 12 else ""


class Errors:
    """All errors of one program, in the order found, each once. `trail`: the calls being inlined, innermost last."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []
        self.trail: list[Span] = []

    def add(self, code: str, title: str, span: Span | None = None, label: str = "", *, help: str = "",
            labels: tuple[Label, ...] = (), notes: tuple[str, ...] = ()) -> Bad:
        """Report, and return BAD so that callers can `return errors.add(...)`."""
        calls = tuple(Label(s, "called from here") for s in self.trail[-1:])
        if not any(d.code == code and d.title == title and d.span == span for d in self.found):
            self.found.append(Diagnostic(code, title, span, label, labels + calls, notes, help))
        return BAD

    def take(self, failure: Failure) -> Bad:
        self.found.extend(d for d in failure.diagnostics if d not in self.found)
        return BAD

    def check(self) -> None:
        """Raise everything found, as one Failure."""
        if self.found:
            raise Failure(self.found)
