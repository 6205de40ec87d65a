"""A page for the terminal, and the list of all codes.

In: a `Page`, or the titles by code. Out: text, with colors on request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rldsl.explain import RANGES, Page

_BOLD, _BLUE, _GREEN, _RED, _OFF = "\033[1m", "\033[34m", "\033[32m", "\033[31m", "\033[0m"
_WORDS = {"broken": "fails", "fixed": "fixed"}
_TONES = {"broken": _RED, "fixed": _GREEN}


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
            if fence[2]:
                tone = _TONES.get(fence[2].split()[0], _BLUE)
                lines += [paint(tone, f"  {caption(fence[2])}"), ""]
        elif fence:
            inside = False
        else:
            lines.append(f"    {line}".rstrip() if inside else line)
    return "\n".join(lines) + "\n"


def caption(words: str) -> str:
    """The caption of a program, from the words after its fence: "fails with `rlc check --set lr=fast`:"."""
    name, _, options = words.partition(" ")
    command = options if options.startswith("compile") else f"check {options}"
    return f"{_WORDS.get(name, name)} with `rlc {command}`:" if options else f"{_WORDS.get(name, name)}:"


def listing(titles: Mapping[str, str]) -> str:
    """All codes with their titles, by range."""
    lines: list[str] = []
    for start, word in RANGES.items():
        mine = [f"  {code}  {title}" for code, title in titles.items() if code.startswith(start)]
        if mine:
            lines += [f"{start}xx  {word}", *mine, ""]
    return "\n".join(lines)
