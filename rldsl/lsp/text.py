"""Offsets of a text and positions of an editor. Editors count lines from 0 and, in a line, units of an encoding."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

UNITS = {"utf-8": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
WIDTH = {"utf-8": 1, "utf-16": 2, "utf-32": 4}


@dataclass(frozen=True)
class Lines:
    """A text, with positions as the protocol counts them."""

    text: str = field(repr=False)  # the whole text
    encoding: str = "utf-16"       # "utf-8", "utf-16" (the protocol's default) or "utf-32": the unit of columns

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *(i + 1 for i, c in enumerate(self.text) if c == "\n"))

    def line(self, number: int) -> str:
        """The text of a line without its newline; "" after the last one."""
        if number >= len(self.starts):
            return ""
        end = self.starts[number + 1] - 1 if number + 1 < len(self.starts) else len(self.text)
        return self.text[self.starts[number] : end]

    def position(self, offset: int) -> tuple[int, int]:
        """(line, unit) of an offset."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self.starts, offset) - 1
        return line, self._units(self.text[self.starts[line] : offset])

    def offset(self, line: int, unit: int) -> int:
        """The offset of a position; what lies after the end of a line is its end, a half character its start."""
        if line >= len(self.starts):
            return len(self.text)
        text, at = self.line(line), 0
        for i, c in enumerate(text):
            at += self._units(c)
            if at > unit:
                return self.starts[line] + i
        return self.starts[line] + len(text)

    def _units(self, text: str) -> int:
        return len(text) if text.isascii() else len(text.encode(UNITS[self.encoding])) // WIDTH[self.encoding]
