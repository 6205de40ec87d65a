"""What to leave out of a text so that the rest can be parsed after a syntax error.

In: the text and the offset of the error. Out: the text with the faulty statement blanked, same length, so that every
later position stays true. One mistake must not lead to a second message: a block whose head is wrong goes as a whole,
and of a bracket that was never closed everything up to the error goes.
"""

from __future__ import annotations

import re

_SILENT = re.compile(r'"(?:\\.|[^"\\\n])*"|#[^\n]*')  # a string without its end hides nothing
PAIRS = {")": "(", "]": "[", "}": "{"}


def visible(text: str) -> str:
    """`text` with the insides of strings and comments blanked, so that brackets in them do not count."""
    return _SILENT.sub(lambda m: " " * len(m.group()), text)


def open_brackets(text: str, end: int) -> list[int]:
    """Offsets of the brackets that are open at `end`, outermost first. A brace closes the round and square ones in it."""
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
    """The offset of a `(` or `[` to blame for an error at `position`: one that is open since an earlier line, where the
    error is the first thing on its own line (or the end of the file)."""
    at_end = position >= len(text.rstrip()) - 1
    end = len(text) if at_end and text[position : position + 1] != "}" else position  # a last brace is not at fault
    stack = [i for i in open_brackets(text, end) if text[i] in "(["]
    first = not text[text.rfind("\n", 0, position) + 1 : position].strip()
    return stack[-1] if stack and (at_end or first and "\n" in text[stack[-1] : position]) else None


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
