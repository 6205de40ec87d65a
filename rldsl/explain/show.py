"""A page for the terminal, and the list of all codes.

In: a `Page`, or the titles by code. Out: text, with colours on request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rldsl.explain import RANGES, Page

_BOLD, _BLUE, _GREEN, _RED, _OFF = "\033[1m", "\033[34m", "\033[32m", "\033[31m", "\033[0m"
_WORDS = {"broken": "this fails", "mended": "this is right"}


def show(page: Page, color: bool = False) -> str:
    """The page: its title, its text, its programs indented and named."""
    def paint(code: str, text: str) -> str:
        return f"{code}{text}{_OFF}" if color else text

    lines = [paint(_BOLD, f"{page.code}: {page.title}")]
    inside = False
    for line in page.text.splitlines()[1:]:
        fence = re.match(r"```(\w*) ?(.*)", line)
        if fence and not inside:
            inside = True
            name, _, options = fence[2].partition(" ")
            word, command = _WORDS.get(name, name), options if options.startswith("compile") else f"check {options}"
            if word:
                tone = _RED if name == "broken" else _GREEN if name == "mended" else _BLUE
                lines += [paint(tone, f"  {word}, with `rlc {command.strip()}`:" if options else f"  {word}:"), ""]
        elif fence:
            inside = False
        else:
            lines.append(f"    {line}".rstrip() if inside else line)
    return "\n".join(lines) + "\n"


def listing(titles: Mapping[str, str]) -> str:
    """All codes with their titles, by range."""
    lines: list[str] = []
    for start, word in RANGES.items():
        mine = [f"  {code}  {title}" for code, title in titles.items() if code.startswith(start)]
        if mine:
            lines += [f"{start}xx  {word}", *mine, ""]
    return "\n".join(lines)
