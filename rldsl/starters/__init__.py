"""Programs to begin with: NAME.rlf, each formatted, commented and correct as it is, and the Python and data that they
use.

In: a name. Out: texts. The first line of a starter says in a sentence what it is.
"""

from __future__ import annotations

import re
from importlib import resources

from rldsl.starters import presets

_USED = re.compile(r'^(?:use py|param rows +=) "([^"/]+)"', re.MULTILINE)  # a program's own data is in no folder


def names() -> tuple[str, ...]:
    """All starters, by name."""
    files = (f.name.removesuffix(".rlf") for f in resources.files(__package__).iterdir() if f.name.endswith(".rlf"))
    return tuple(sorted((*files, *presets.PRESETS)))


def text(name: str) -> str:
    """The program."""
    if name in presets.PRESETS:
        return presets.text(name, text(presets.PRESETS[name].base))
    return _read(f"{name}.rlf")


def line(name: str) -> str:
    """What it is, in one line."""
    return text(name).split("\n", 1)[0].removeprefix("# ")


def used(name: str) -> tuple[tuple[str, str], ...]:
    """(file, text) of the Python and the data that it uses, which belong next to it."""
    return tuple((file, _read(file)) for file in _USED.findall(text(name)))


def _read(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text("utf-8")
