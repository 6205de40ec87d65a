"""Diagnostics as text, JSON, and annotations for GitHub. One value, three renderers."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TextIO

from rldsl.diag import Diagnostic, visible
from rldsl.source import Span

LINES = "\n\t"  # what a text of several lines keeps of control characters

_RED, _BLUE, _BOLD, _YELLOW, _OFF = "\033[31m", "\033[34m", "\033[1m", "\033[33m", "\033[0m"


def render(diagnostics: Iterable[Diagnostic], color: bool = False) -> str:
    """Every message with its place underlined, in the order given, a blank line between two. Control characters in them
    are escaped."""
    return "\n\n".join(_one(_escaped(d), color) for d in diagnostics)


def colored(stream: TextIO) -> bool:
    """Whether to print colors: the first of NO_COLOR, FORCE_COLOR, CLICOLOR_FORCE and CLICOLOR that is set decides
    (no-color.org, force-color.org, bixense.com/clicolors), or else whether the stream is a terminal that has them."""
    def value(name: str) -> str:
        return os.environ.get(name, "")

    if value("NO_COLOR"):
        return False
    if value("FORCE_COLOR"):
        return value("FORCE_COLOR") != "0"
    if value("CLICOLOR_FORCE") not in ("", "0"):
        return True
    return value("CLICOLOR") != "0" and value("TERM") != "dumb" and stream.isatty()


def _escaped(d: Diagnostic) -> Diagnostic:
    """Notes and advice may have several lines."""
    return replace(d, title=visible(d.title), label=visible(d.label), place=visible(d.place),
                   help=visible(d.help, LINES),
                   labels=tuple(replace(x, text=visible(x.text)) for x in d.labels),
                   notes=tuple(visible(note, LINES) for note in d.notes))


def to_json(diagnostics: Iterable[Diagnostic]) -> str:
    """{"format": 1, "diagnostics": [...]}; lines and columns count from 1, `start` and `end` are character offsets
    from 0. `fix`: null, or edits that fix the error, to be applied together."""
    return json.dumps({"format": 1, "diagnostics": [record(d) for d in diagnostics]}, indent=1, ensure_ascii=False)


def to_github(diagnostics: Iterable[Diagnostic]) -> str:
    """One workflow command for each message."""
    lines = []
    for d in map(_escaped, diagnostics):
        where = f" file={d.span.file.name},line={d.span.line},col={d.span.column}," if d.span else " "
        text = ". ".join(part for part in (d.title, d.label, d.help) if part)
        text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        lines.append(f"::{d.severity}{where}title={d.code}::{text}")
    return "\n".join(lines)


def _one(d: Diagnostic, color: bool) -> str:
    paint = (lambda code, text: f"{code}{text}{_OFF}") if color else (lambda code, text: text)
    tone = _RED if d.severity == "error" else _YELLOW
    lines = [paint(_BOLD + tone, f"{d.severity}[{d.code}]") + paint(_BOLD, f": {d.title}")]
    marks = ([(d.span, d.label, True)] if d.span else []) + [(x.span, x.text, False) for x in d.labels]
    gutter = " " * max((len(str(span.line)) for span, _, _ in marks), default=1)
    if d.span or d.place:
        lines.append(paint(_BLUE, f"{gutter}--> ") + (visible(str(d.span)) if d.span else d.place))
    for file in dict.fromkeys(span.file.name for span, _, _ in marks):
        if d.span is None or file != d.span.file.name:
            lines.append(paint(_BLUE, f"{gutter}::: ") + visible(file))
        lines.append(paint(_BLUE, f"{gutter} |"))
        mine = sorted((m for m in marks if m[0].file.name == file), key=lambda m: (m[0].line, m[0].column))
        previous = 0
        for span, text, primary in mine:
            if previous and span.line > previous + 1:
                lines.append(paint(_BLUE, f"{gutter} :"))
            if span.line != previous:
                shown = _printable(span.file.line(span.line))
                lines.append((paint(_BLUE, f"{span.line:>{len(gutter)}} |") + f" {shown}").rstrip())
            mark = " " * _indent(span) + ("^" if primary else "-") * _width(span) + (f" {text}" if text else "")
            lines.append(paint(_BLUE, f"{gutter} | ") + paint(tone if primary else _BLUE, mark))
            previous = span.line
    if (d.notes or d.help) and marks:
        lines.append(paint(_BLUE, f"{gutter} |"))
    lines += [paint(_BLUE, f"{gutter} = ") + f"note: {note}" for note in d.notes]
    if d.help:
        lines.append(paint(_BLUE, f"{gutter} = ") + f"help: {d.help}")
    return "\n".join(lines)


def _printable(line: str) -> str:
    """The line as it can be shown: tabs as four blanks, control characters as a dot."""
    return "".join("    " if c == "\t" else "·" if unicodedata.category(c) == "Cc" else c for c in line)


def _cells(text: str) -> int:
    """Columns of a terminal that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1
               for c in _printable(text))


def _indent(span: Span) -> int:
    return _cells(span.file.line(span.line)[: span.column - 1])


def _width(span: Span) -> int:
    """Cells of the underlined part, on its first line; at least one."""
    line = span.file.line(span.line)[span.column - 1 :]
    return max(1, _cells(line[: max(0, span.end - span.start)].rstrip()))


def record(d: Diagnostic) -> dict[str, Any]:
    """One diagnostic as `to_json` writes it."""
    return {
        "code": d.code, "severity": d.severity, "title": d.title, "place": d.place, "label": d.label,
        "span": _place(d.span), "labels": [{"span": _place(x.span), "text": x.text} for x in d.labels],
        "notes": list(d.notes), "help": d.help,
        "fix": [{"span": _place(span), "text": text} for span, text in d.fix.edits] if d.fix else None,
    }


def _place(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {"file": span.file.name, "line": span.line, "column": span.column, "start": span.start, "end": span.end}
