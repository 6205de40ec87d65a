"""A built-in function without code that lowers it stops the compiler when it is imported, not a user's program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rldsl.plan.operators import BUILTINS, OPERATORS
from rldsl.semantics.builtins import SPECIAL
from rldsl.semantics.operators import COMPOSITES

ADD = """
from rldsl.plan import operators
operators.BUILTINS["midrange"] = operators.Builtin("midrange", FORM, (("midrange(x)", "F -> batch", "the middle"),))
import rldsl.semantics.builtins, rldsl.semantics.operators
"""


@pytest.mark.parametrize("form, table", [("reduction", "COMPOSITES"), ("special", "SPECIAL")])
def test_a_function_of_several_operators_needs_an_entry(form: str, table: str) -> None:
    ran = subprocess.run([sys.executable, "-c", ADD.replace("FORM", repr(form))], capture_output=True, text=True)
    assert ran.returncode and f"{table}: midrange" in ran.stderr.splitlines()[-1]


def test_every_function_without_an_operator_is_in_a_table() -> None:
    assert {b.name for b in BUILTINS.values() if not b.operator} == {*COMPOSITES, "clip", "choice", "over"}
    assert {"clip", "choice"} < SPECIAL.keys()
    assert {b.operator for b in BUILTINS.values() if b.operator} <= OPERATORS.keys()
