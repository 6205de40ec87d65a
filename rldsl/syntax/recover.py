"""What to leave out of a text so that the rest can be parsed after a syntax error.

In: the text and the offset of the error. Out: the text with the faulty statement blanked, same length, so that every
later position stays true. One mistake must not lead to a second message: a block with a wrong header is
blanked as a whole, and after a bracket that was never closed everything up to the error is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SILENT = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*')  # a string without its end hides nothing
PAIRS = {")": "(", "]": "[", "}": "{"}


def visible(text: str) -> str:
    """`text` with the insides of strings and comments blanked, so that brackets in them do not count."""
    return _SILENT.sub(lambda m: " " * len(m.group()), text)


def open_brackets(text: str, end: int) -> list[int]:
    """Offsets of the brackets that are open at `end`, outermost first. A brace closes round and square ones in it."""
    stack: list[int] = []
    for i, c in enumerate(visible(text)[:end]):
        if c in "([{":
            stack.append(i)
        elif c in PAIRS:
            while c == "}" and stack and text[stack[-1]] in "([":
                stack.pop()
            if stack and text[stack[-1]] == PAIRS[c]:
                stack.pop()
    return stack


def unclosed(text: str, position: int) -> int | None:
    """The offset of a `(` or `[` to blame for an error at `position`: one that no bracket below closes, open since an
    earlier line or up to the end of the file."""
    at_end = position >= len(text.rstrip()) - 1
    end = len(text) if at_end and text[position : position + 1] != "}" else position  # a last brace is not at fault
    stack = [i for i in open_brackets(text, end) if text[i] in "(["]
    if not stack or not (at_end or "\n" in text[stack[-1] : position]):
        return None
    return stack[-1] if at_end or not _closes(text, stack[-1]) else None


def _closes(text: str, bracket: int) -> bool:
    """Whether the round or square bracket at `bracket` has a partner, before the end of the block that it is in."""
    shown = visible(text)
    depth = 0
    for c in shown[bracket:]:
        if c in "{}":
            return False
        depth += (c in "([") - (c in ")]")
        if depth == 0:
            return True
    return False


def unclosed_brace(text: str, position: int) -> int | None:
    """The offset of the `{` to blame where one is missing a partner at `position`: the first that is closed by a brace
    which is further left than the line it opens on, else the innermost one that is open."""
    shown = visible(text)
    stack: list[int] = []
    for i, c in enumerate(shown[:position]):
        if c == "{":
            stack.append(i)
        elif c == "}" and stack:
            opened = stack.pop()
            if "\n" in text[opened:i] and _indent(text, i) < _indent(text, opened):
                return opened
    return stack[-1] if stack else None


def first_in_a_block(shown: str, matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    """The first of `matches`, in the order of the text, at which a brace is open. shown: what `visible` gives."""
    depth = at = 0
    for match in matches:
        for c in shown[at : match.start()]:
            depth = max(0, depth + (c == "{") - (c == "}"))
        if depth:
            return match
        at = match.start()
    return None


def _indent(text: str, position: int) -> int:
    line = text[text.rfind("\n", 0, position) + 1 :]
    return len(line) - len(line.lstrip(" \t"))


def blank_lines(text: str, start: int, end: int) -> str:
    """`text` without everything from the line of `start` up to `end`."""
    first = text.rfind("\n", 0, start) + 1
    return text[:first] + "".join(c if c == "\n" else " " for c in text[first:end]) + text[end:]


def blank(text: str, start: int, position: int) -> str:
    """`text` without the lines from that of `start` to that of `position`, and without the block that they open."""
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", position)
    last = len(text) if last < 0 else last
    shown = visible(text)
    depth, keep = 0, set()
    for i in range(first, last):
        if shown[i] == "{":
            depth += 1
        elif shown[i] == "}":
            if depth:
                depth -= 1
            elif i != position:
                keep.add(i)  # closes a block that was opened before: still needed
    while depth and last < len(text):
        depth += (shown[last] == "{") - (shown[last] == "}")
        last += 1
    region = "".join(c if c == "\n" or i in keep else " " for i, c in enumerate(text[first:last], first))
    return text[:first] + region + text[last:]
