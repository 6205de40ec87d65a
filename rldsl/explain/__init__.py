"""The meaning of every code: one page each, `pages/RLxxxx.md`, and this loader.

In: a code. Out: its page. A page begins with `# RLxxxx: title`, followed by text. Its programs are in fences:

    ```rlf broken            a program that gives exactly this code
    ```rlf fixed             the same program without the error
    ```rlf NAME, ```py NAME  another file that the examples need, in the same directory
    ```rlf broken --set lr=fast --place rules.rlf    options of `rlc check`, as typed on the command line
    ```rlf broken compile    an error that `rlc compile` finds and `rlc check` cannot, because it needs the models
                             (models/tiny, and models/small with fewer layers)

A code is never given a second meaning, and a page is the only place that lists it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

_TITLE = re.compile(r"# (RL\d{4}): (.+)\n")
_FENCE = re.compile(r"^```(\w+)(?: +([^\n]*))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

RANGES = {
    "RL00": "syntax and files", "RL01": "names", "RL02": "types", "RL03": "placement", "RL04": "memory",
    "RL05": "schedule", "RL06": "plan files", "RL07": "run time", "RL08": "engines", "RL09": "lints",
}


@dataclass(frozen=True, slots=True)
class Example:
    """One program of a page."""

    role: str                       # "broken" or "fixed"
    text: str  # the program
    options: tuple[str, ...] = ()   # arguments of the command line
    compile: bool = False           # whether only `rlc compile` finds the error


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one code."""

    code: str  # "RL0202"
    title: str  # the first line
    text: str                               # the whole page, as written
    examples: tuple[Example, ...]  # in the order of the page
    files: tuple[tuple[str, str], ...]      # (name, text) of other files that the examples need


def page(code: str) -> Page | None:
    """The page of a code ("RL0304"), if there is one."""
    if code not in codes():
        return None
    return parse(_text(code))


@cache
def page_file(code: str) -> str:
    """The path of a code's page; "" if there is none, or if it is no file (in a zipped package)."""
    found = str(_pages() / f"{code}.md")
    return found if code in codes() and os.path.isfile(found) else ""


@cache
def codes() -> Mapping[str, str]:
    """Every code with its title, in order. The pages are a part of the package: they are read once."""
    names = sorted(p.name.removesuffix(".md") for p in _pages().iterdir() if p.name.endswith(".md"))
    return MappingProxyType({name: parse(_text(name)).title for name in names})


def nearest(code: str) -> tuple[str, ...]:
    """Similar codes: up to three of the same range, the nearest numbers first."""
    if not re.fullmatch(r"RL\d{4}", code):
        return ()
    same = [c for c in codes() if c[:4] == code[:4]]
    return tuple(sorted(same, key=lambda c: (abs(int(c[2:]) - int(code[2:])), c))[:3])


def normal(word: str) -> str:
    """A code as people type it ("rl304", "0304") in its canonical form, "RL0304"."""
    digits = word.strip().upper().removeprefix("RL")
    return f"RL{digits:0>4}" if digits.isdecimal() else word.strip()


def parse(text: str) -> Page:
    """A page from its text. ValueError if it does not have the form above."""
    head = _TITLE.match(text)
    if head is None:
        raise ValueError(f"a page begins with `# RLxxxx: title`, not {text[:40]!r}")
    examples: list[Example] = []
    files: list[tuple[str, str]] = []
    for fence in _FENCE.finditer(text):
        words = shlex.split(fence[2] or "")
        if words and words[0] in ("broken", "fixed"):
            needs = words[1:2] == ["compile"]
            examples.append(Example(words[0], fence[3], tuple(words[1 + needs:]), needs))
        elif words:
            files.append((words[0], fence[3]))
    return Page(head[1], head[2], text, tuple(examples), tuple(files))


def _pages() -> Traversable:
    return resources.files(__name__) / "pages"


def _text(code: str) -> str:
    return (_pages() / f"{code}.md").read_text("utf-8")
