"""Commands of the documentation, as far as they can be judged without running them.

In: the text of a page. Out: the lines that would be refused: `rlc` with a command, an option or a number of arguments
that it does not have, options that `rldsl.run` does not know, files of the repository and targets of the Makefile that
are not there.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from rldsl.cli import main

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(?:bash|sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_RUN = set(re.findall(r'add_argument\("(--[\w-]+)"', (ROOT / "rldsl/run.py").read_text()))
_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(text: str) -> Iterator[str]:
    """The lines of fences without a language, and of shells; a line that ends in a backslash goes on."""
    for fence in _FENCE.findall(text):
        yield from re.sub(r"\\\n\s*", "", fence).splitlines()


def refused(text: str, folder: Path) -> list[str]:
    """folder: an empty one, for the files that commands name. The working directory must be this."""
    return [line for line in commands(text) if not _accepted(line, folder)]


def _accepted(line: str, folder: Path) -> bool:
    words = shlex.split(line, comments=True) if re.match(r"rlc |torchrun |python |make ", line) else []
    match words:
        case ["rlc", "--output", _, name, *rest] | ["rlc", name, *rest]:
            return _parsed(name, rest, folder)
        case ["make", *targets]:
            return set(targets) <= _TARGETS
        case ["python", file, *_] if file.endswith(".py"):
            return (ROOT / file).is_file()
        case ["torchrun" | "python", *rest] if "rldsl.run" in rest:
            given = rest[rest.index("rldsl.run") + 1 :]
            return {word.partition("=")[0] for word in given if word.startswith("--")} <= _RUN
    return True


def _parsed(name: str, rest: list[str], folder: Path) -> bool:
    for file in [a for a in rest if a.endswith((".rlf", ".plan"))]:
        (folder / Path(file).name).touch()
    try:
        main.commands[name].make_context(name, list(rest))
    except (KeyError, click.ClickException):
        return False
    except click.exceptions.Exit:  # --help
        return True
    return True
