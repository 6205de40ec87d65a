"""Messages about functions that were passed from Python name the cell or the script in which the user wrote them.

In: what ranks print about the file of captured source (`redirect.py`). Out: the same text with the user's own places.
Only the process that captured the functions knows these: another one names the file, which can be read.
"""

from __future__ import annotations

import os
import re
import sys

from rldsl.python.captured import Definition
from rldsl.python.redirect import Redirection


def in_own_places(text: str, redirection: Redirection) -> str:
    """The text with `In[3], line 2` or `script.py:12` instead of lines of the captured source."""
    if not redirection.path:
        return text
    return re.sub(re.escape(redirection.path) + r"(?::(\d+))?", lambda found: _place(found, redirection), text)


def _place(found: re.Match[str], redirection: Redirection) -> str:
    """Where a line comes from; without a line, all files or cells that the source comes from. Lines that the user did
    not write as they are, such as imports, stay."""
    if found[1] is None:
        files = dict.fromkeys(_name(d.file) for d in redirection.definitions)
        return ", ".join(files) or found[0]
    line = int(found[1])
    for definition in redirection.definitions:
        if definition.first <= line < definition.first + definition.count:
            return _own(definition, line)
    return found[0]


def _own(definition: Definition, line: int) -> str:
    name, number = _name(definition.file), definition.line + line - definition.first
    return f"{name}, line {number}" if _is_cell(name) else f"{name}:{number}"


def _name(file: str) -> str:
    """What the user calls a file: the cell of a notebook as IPython does, a file below the working directory by its
    relative path."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    naming = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    if (cell := naming(file)) is not None:
        return " ".join(cell)
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative


def _is_cell(name: str) -> bool:
    return name.startswith("Cell ")
