"""Diagnostics of a program as one value that prints itself.

In: diagnostics. Out: text, with colors on request, or HTML.
"""

from __future__ import annotations

from typing import Any

from rldsl.diag import Diagnostic
from rldsl.python.html import terminal
from rldsl.report import render, to_json


class Diagnostics(tuple[Diagnostic, ...]):
    """The messages about a program, in its order: a tuple of `rldsl.diag.Diagnostic`. Empty, and so false, if there are
    none."""

    __slots__ = ()

    @property
    def errors(self) -> Diagnostics:
        """Only the errors."""
        return Diagnostics(d for d in self if d.severity == "error")

    @property
    def warnings(self) -> Diagnostics:
        """Only the warnings."""
        return Diagnostics(d for d in self if d.severity == "warning")

    @property
    def ok(self) -> bool:
        """Whether the program may be compiled: warnings do not count."""
        return not self.errors

    @property
    def codes(self) -> tuple[str, ...]:
        """The code of each message; `rlc explain CODE` explains one."""
        return tuple(d.code for d in self)

    def text(self, color: bool = False) -> str:
        """Every message, with the code that it is about underlined."""
        return render(self, color) if self else "no errors found"

    def json(self) -> str:
        """The messages as JSON, in the form of docs/messages.md."""
        return to_json(self)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return terminal(self.text(color=True))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text())
