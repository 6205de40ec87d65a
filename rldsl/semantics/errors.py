"""Collecting diagnostics: a mistake is reported once, becomes BAD, and everything made from BAD stays silent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Final

from rldsl.diag import Diagnostic, Failure, Fix, Label
from rldsl.source import Span


class Bad:
    """The poison value: an error has been reported, and nothing that depends on it reports another."""

    __slots__ = ()


BAD: Final = Bad()
NO_VALUE: Final = BAD  # result of a call that returns nothing; no error, but uses are not diagnosed either


class Advice(str):
    """Advice that names the one right word: `word` may replace the misspelt one automatically."""

    word: str


def suggest(name: str, known: Iterable[str], first: Iterable[str] = ()) -> str:
    """Advice for a misspelt name: the nearest known one, or the whole list when it is short. `first`: those to prefer
    where two are equally near. An `Advice` where no other name is nearly as near."""
    names, preferred = sorted(set(known)), frozenset(first)
    rated = sorted(((likeness(name, n), n in preferred, n) for n in names), reverse=True)
    if not rated or rated[0][0] < 0.6:
        return f"names defined here: {', '.join(names)}" if 0 < len(names) <= 12 else ""
    text = f"did you mean `{rated[0][2]}`?"
    if len(name) < 3 or rated[0][0] < 0.7 or len(rated) > 1 and rated[0][0] - rated[1][0] < 0.12:
        return text
    advice = Advice(text)
    advice.word = rated[0][2]
    return advice


def in_library(span: Span) -> bool:
    """Whether the text belongs to the standard library."""
    return span.file.name.startswith("std/")


def likeness(a: str, b: str) -> float:
    """From 0 to 1; two letters that changed places, or another case, are nearly nothing."""
    if a.lower() == b.lower() or len(a) > 2 and sorted(a) == sorted(b):
        return 0.95
    matcher = SequenceMatcher(None, a, b)
    return matcher.ratio() if matcher.real_quick_ratio() >= 0.6 else 0.0


class Errors:
    """All errors of one program, in the order found, each once."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []
        self._unknown: dict[tuple[str, str], int] = {}  # (module, name) of an unknown name -> which message
        self.trail: list[Span] = []  # the calls being inlined, innermost last

    def add(self, code: str, title: str, span: Span | None = None, label: str = "", *, help: str = "",
            labels: tuple[Label, ...] = (), notes: tuple[str, ...] = (), fix: Fix | None = None) -> Bad:
        """Report, and return BAD so that callers can `return errors.add(...)`. An `Advice` becomes a fix."""
        calls: tuple[Label, ...] = ()
        if self.trail and span is not None and in_library(span):  # not the reader's text: point at the call
            own = next((s for s in reversed(self.trail) if not in_library(s)), self.trail[0])
            if any(d.code == code and d.span == own for d in self.found):
                return BAD  # the same call: most likely what is wrong with it shows in two places
            labels = (Label(span, label or "here in the library"), *(x for x in labels if x.span != span))
            span, label = own, "in this call"
        else:
            calls = tuple(Label(s, "called from here") for s in self.trail[-1:])
        if not any(d.code == code and d.title == title and d.span == span for d in self.found):
            if fix is None and isinstance(help, Advice) and span is not None and re.fullmatch(r"[\w.]+", span.text):
                fix = Fix(((span, help.word),))
            self.found.append(Diagnostic(code, title, span, label, labels + calls, notes, help, fix=fix))
        return BAD

    def unknown(self, module: str, name: str, span: Span, label: str, help: Callable[[], str]) -> Bad:
        """An unknown name: one message however often it occurs in the module, with a fix for every place."""
        index = self._unknown.setdefault((module, name), len(self.found))
        if index == len(self.found):
            return self.add("RL0101", f"unknown name `{name}`", span, label, help=help())
        first = self.found[index]
        if first.code == "RL0101" and first.fix is not None and span not in [s for s, _ in first.fix.edits]:
            fix = Fix((*first.fix.edits, (span, first.fix.edits[0][1])))
            self.found[index] = replace(first, fix=fix)
        return BAD

    def extend(self, failure: Failure) -> Bad:
        self.found.extend(d for d in failure.diagnostics if d not in self.found)
        return BAD

    def check(self) -> None:
        """Raise everything found, as one Failure."""
        if self.found:
            raise Failure(self.found)
