"""Source text and positions. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field

COMMAND_LINE = "<command line>"  # the name of the file of what was typed there: `--on` rules, `--set`


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One text that spans point into."""

    name: str                      # the path as the user typed it
    text: str = field(repr=False)  # the whole text

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without its newline."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of character offsets in one file."""

    file: SourceFile = field(repr=False)  # the text that the offsets are in
    start: int                            # of the first character
    end: int                              # after the last character

    @property
    def line(self) -> int:
        """Line of `start`, from 1."""
        return self.file.text.count("\n", 0, self.start) + 1

    @property
    def column(self) -> int:
        """Column of `start`, from 1."""
        return self.start - (self.file.text.rfind("\n", 0, self.start) + 1) + 1

    @property
    def text(self) -> str:
        return self.file.text[self.start : self.end]

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.file, self.start, other.end)

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}:{self.column}"
