"""Diagnostics: what went wrong, where, and how to fix it. One value, several renderers.

Codes by range: RL00xx syntax, 01xx names, 02xx types, 03xx placement, 04xx memory, 05xx schedule, 06xx plan,
07xx run time, 09xx lints. A code is never given a second meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from rldsl.source import Span

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Label:
    """Another place that contributes to a diagnostic."""

    span: Span  # the place
    text: str   # what it contributes


@dataclass(frozen=True, slots=True)
class Fix:
    """An edit that fixes an error and is safe to apply without a look at the result."""

    edits: tuple[tuple[Span, str], ...]  # (what to replace, replacement): all or none of them; they do not overlap


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One message."""

    code: str  # "RL0101"
    title: str  # a complete sentence, in lower case, without a full stop
    span: Span | None = None  # what is underlined; None: there is no source text
    label: str = ""  # explains the underlined span
    labels: tuple[Label, ...] = ()  # other places that contribute
    notes: tuple[str, ...] = ()  # facts that explain the message
    help: str = ""  # advice, and nothing else
    place: str = ""  # instead of `span`: a data file's "prompts.jsonl:17", a plan's "event 12"
    severity: Literal["error", "warning"] = "error"  # a warning does not end a command, except `rlc check --strict`
    fix: Fix | None = None  # the advice of `help` as edits, if it is certain


def visible(text: str, keep: str = "") -> str:
    """The text with every character that does not print as itself written as an escape: a terminal obeys control
    characters, and text of plans, data, models and workers comes from elsewhere. keep: characters left as they are."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape", "surrogatepass").decode()
                   for c in text)


class Failure(Exception):
    """Diagnostics on their way to the user: what every step raises for a user's mistake."""

    def __init__(self, diagnostics: Iterable[Diagnostic]):
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__("; ".join(f"{d.code} {d.title}" for d in self.diagnostics))

    def __reduce__(self) -> tuple[type[Failure], tuple[object, ...]]:
        # An exception with its own __init__ needs this to cross process boundaries.
        return (Failure, (self.diagnostics,))


def fail(code: str, title: str, span: Span | None = None, label: str = "", *, help: str = "", place: str = "",
         notes: tuple[str, ...] = ()) -> Failure:
    """A Failure of one diagnostic, ready to raise."""
    return Failure([Diagnostic(code, title, span, label, help=help, place=place, notes=notes)])


class InternalError(Exception):
    """The compiler or the runtime contradicts itself: no user's mistake, so whoever handles Failures lets it pass."""

    def __init__(self, diagnostic: Diagnostic):
        self.diagnostic = diagnostic
        super().__init__("; ".join((f"{diagnostic.code} {diagnostic.title}", *diagnostic.notes)))

    def __reduce__(self) -> tuple[type[InternalError], tuple[Diagnostic]]:
        return InternalError, (self.diagnostic,)


def internal_error(title: str, place: str = "", notes: tuple[str, ...] = ()) -> InternalError:
    """RL0699: something that the compiler must never let happen, whatever the program says."""
    return InternalError(Diagnostic(
        "RL0699", f"internal compiler error: {title}", place=place, notes=notes,
        help="the program is not at fault; please report this with the program and the output of `rlc --version`"))


def present(value: T | None, what: str, place: str = "") -> T:
    """`value`, which cannot be None here. what: its name, for the message. Raises InternalError."""
    if value is None:
        raise internal_error(f"there is no {what}", place)
    return value


def counted(number: int, noun: str) -> str:
    """A number and what it counts: "1 rank", "2 ranks", "0 entries"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"
