"""Programs in the cells of a notebook: `%load_ext rldsl.notebook`, then `%%rlf`.

In: a cell with a program, and IPython's shell. Out: what was found in it, or with a name a `Plan` under that name:

    %%rlf                                        check the program; needs no model
    %%rlf plan                                   compile it, and call the plan `plan`
    %%rlf plan --set lr=1e-6 --on "actor.train on mesh(0:4)" --place rules.rlf
    %%rlf --write ppo.rlf                        keep the cell as a file, too

Mistakes show as diagnostics, here and in every other cell, never as a traceback. This is the only module that imports
IPython.
"""

from __future__ import annotations

import argparse
import re
from keyword import iskeyword

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from rldsl import api
from rldsl.diag import present
from rldsl.files import write
from rldsl.python.entry import check_source, compile_source
from rldsl.python.errors import ELSEWHERE, DiagnosticError, reports_failures
from rldsl.source import SourceFile

CELL = "<cell>"
UNKNOWN = re.compile(r"\$\w+|\{\w+\}")  # IPython leaves a variable that does not exist as it is


@magics_class
class RlfMagics(Magics):
    """`%%rlf`, for one shell."""

    @magic_arguments()
    @argument("name", nargs="?", help="Name for the compiled plan. Without it the program is only checked.")
    @argument("--set", dest="sets", action="append", default=[], metavar="NAME=VALUE",
              help="Set a `param` of the program; $name takes the value from Python.")
    @argument("--place", metavar="FILE", help="A file of `place` rules.")
    @argument("--on", action="append", default=[], metavar="RULE", help="A placement rule that overrides all others.")
    @argument("--write", metavar="FILE", help="Write the program to this file, for `rlc run`, even if it has errors.")
    @cell_magic
    def rlf(self, line: str, cell: str) -> None:
        """Check or compile the program in this cell."""
        self.answer(parse_argstring(self.rlf, line), cell)

    @reports_failures
    def answer(self, given: argparse.Namespace, cell: str) -> None:
        """Raises UsageError for a name that Python cannot have, DiagnosticError for the program."""
        if given.name is not None and (not given.name.isidentifier() or iskeyword(given.name)):
            raise UsageError(f"{given.name!r} cannot be the name of a plan")
        sets = dict(map(_pair, given.sets))
        kept, on = unquoted(given.write or ""), [unquoted(rule) for rule in given.on]
        source = SourceFile(kept or CELL, cell)
        place = api.read_source(unquoted(given.place)) if given.place else None
        if kept:
            write(kept, cell.encode(), ELSEWHERE)
        if given.name is None:
            diagnostics = check_source(source, sets, place, on)
            if not diagnostics.ok:
                raise DiagnosticError(diagnostics)
            display(diagnostics)
            return
        plan = compile_source(source, sets, place, on)
        present(self.shell, "IPython shell", "notebook").push({given.name: plan})
        display(plan)


def unquoted(text: str) -> str:
    """IPython leaves the quotes around an argument where they are."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = unquoted(text).partition("=")
    if not equals or not name.strip():
        raise UsageError(f"--set {text}: expected NAME=VALUE")
    if UNKNOWN.fullmatch(value := unquoted(value)):
        raise UsageError(f"--set {text}: there is no Python variable `{value.strip('${}')}`")
    return name.strip(), value


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What `%load_ext rldsl.notebook` does."""
    shell.register_magics(RlfMagics)
