"""Applying the fixes that diagnostics carry (`rlc check --fix`).

In: a file and diagnostics. Out: its text with the edits made. Invariant: a fix is applied whole or not at all; of two
that touch each other only the first is taken, and only edits of this very text are made.
"""

from __future__ import annotations

from collections.abc import Iterable

from rldsl.diag import Diagnostic
from rldsl.source import SourceFile, Span


def apply(source: SourceFile, diagnostics: Iterable[Diagnostic]) -> tuple[str, int]:
    """(the fixed text, how many fixes were applied)."""
    taken: list[tuple[Span, str]] = []
    applied = 0
    for d in diagnostics:
        if d.fix is None or not d.fix.edits:
            continue
        own = all(s.file == source and 0 <= s.start <= s.end <= len(source.text) for s, _ in d.fix.edits)
        if own and not any(_touch(a, b) for a, _ in d.fix.edits for b, _ in taken):
            taken += d.fix.edits
            applied += 1
    text = source.text
    for span, new in sorted(taken, key=lambda edit: edit[0].start, reverse=True):
        text = text[: span.start] + new + text[span.end :]
    return text, applied


def _touch(a: Span, b: Span) -> bool:
    return a.start <= b.end and b.start <= a.end
