"""What the Python API raises: diagnostics that read as diagnostics, in a terminal and in a notebook.

In: a `Failure` of the compiler. Out: a `DiagnosticError` with the same diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from rldsl.diag import Failure
from rldsl.python.messages import Diagnostics

P = ParamSpec("P")
R = TypeVar("R")
ELSEWHERE = "choose another path"  # of a file that cannot be written; the command line names its options


class DiagnosticError(Failure):
    """An error of the user: in a program, a plan, a cluster, or an argument. `diagnostics` has all of them; as text
    it is what `rlc` prints. IPython shows that text alone, since a traceback through the compiler helps nobody."""

    def __str__(self) -> str:
        return str(Diagnostics(self.diagnostics))

    def __reduce__(self) -> tuple[type[DiagnosticError], tuple[object, ...]]:
        return DiagnosticError, (self.diagnostics,)

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback."""
        return Diagnostics(self.diagnostics).text(color=True).splitlines()


def reports_failures(body: Callable[P, R]) -> Callable[P, R]:
    """The function, with its Failures raised as a `DiagnosticError`."""
    @wraps(body)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return body(*args, **kwargs)
        except DiagnosticError:
            raise
        except Failure as failure:
            raise DiagnosticError(failure.diagnostics) from None

    return guarded
