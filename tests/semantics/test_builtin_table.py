"""A built-in function without code that lowers it stops the compiler when it is imported, not a user's program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from rldsl.diag import Failure
from rldsl.graph.build import build
from rldsl.plan.expr import Level, Scalar
from rldsl.plan.operators import BUILTINS, OPERATORS, Builtin
from rldsl.semantics.builtins import SPECIAL
from rldsl.semantics.errors import Bad
from rldsl.semantics.composites import COMPOSITES
from rldsl.semantics.operators import Operators
from rldsl.semantics.terms import Term
from rldsl.source import SourceFile, Span
from rldsl.syntax.parse import parse

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
    assert {b.name for b in BUILTINS.values() if not b.operator} == {
        *COMPOSITES, "clip", "choice", "over", "along", "prefixes", "pick", "others", "whole", "pair",
        "concat"}
    assert {"clip", "choice"} < SPECIAL.keys()
    assert {b.operator for b in BUILTINS.values() if b.operator} <= OPERATORS.keys()


def test_options_that_nothing_reads_stop_the_compiler_at_import() -> None:
    add = ADD.replace("FORM", "'elementwise'").replace("),))", "),), 'abs', options=('half',))")
    ran = subprocess.run([sys.executable, "-c", add], capture_output=True, text=True)
    assert ran.returncode and "COMPOSITES read options" in ran.stderr.splitlines()[-1] and "midrange" in ran.stderr


FLOW = """data d = jsonl("d.jsonl", batch=4, kind="prompts", numbers=["n"])
flow f(steps=1) {
  p = d.next()
  metric x = %s
}
"""


def compile_metric(expression: str) -> None:
    build(parse(SourceFile("main.rlf", FLOW % expression)), {}, read=lambda path: "")


@pytest.fixture
def trimmed(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Scalar]]:
    """A reduction with two options; the options of its calls."""
    calls: list[Mapping[str, Scalar]] = []

    def lowered(ops: Operators, x: Term, to: Level, span: Span, options: Mapping[str, Scalar]) -> Term | Bad:
        calls.append(options)
        return ops.reduce("mean", x, to, span)

    rows = (("trimmed(x)", "F -> batch", "the mean without extremes"),)
    monkeypatch.setitem(BUILTINS, "trimmed", Builtin("trimmed", "reduction", rows, options=("low", "high")))
    monkeypatch.setitem(COMPOSITES, "trimmed", lowered)  # type: ignore[arg-type]
    return calls


def test_each_option_is_passed_under_its_own_name(trimmed: list[Mapping[str, Scalar]]) -> None:
    compile_metric("trimmed(p.n, high=0.9, low=0.1)")
    compile_metric("trimmed(p.n, low=0.2)")
    compile_metric("trimmed(p.n)")
    assert [dict(c) for c in trimmed] == [{"high": 0.9, "low": 0.1}, {"low": 0.2}, {}]


@pytest.mark.parametrize("expression, code", [
    ("trimmed(p.n, middle=0.5)", "RL0107"), ("trimmed(p.n, low=mean(p.n))", "RL0211"),
    ("mean(p.n, unbiased=true)", "RL0107"),
    ('std(p.n, unbiased="false")', "RL0205"), ("var(p.n, unbiased=0)", "RL0205"), ("std(p.n, unbiased=2)", "RL0205"),
    ('var(p.n, unbiased="no")', "RL0205"), ("quantile(p.n, true)", "RL0205"), ('quantile(p.n, "x")', "RL0205"),
])
def test_options_are_declared_and_constant(trimmed: list[Mapping[str, Scalar]], expression: str, code: str) -> None:
    with pytest.raises(Failure) as caught:
        compile_metric(expression)
    assert [d.code for d in caught.value.diagnostics] == [code] and not trimmed


@pytest.mark.parametrize("call, title", [
    ('choice("a")', "`choice` takes at least 2 arguments, not 1"),
    (f'choice({", ".join(100 * [chr(34) + "a" + chr(34)])})', "`choice` takes at most 99 arguments, not 100"),
    ("exp(1, 2)", "`exp` takes 1 argument, not 2"), ("min()", "`min` takes 1 or 2 arguments, not 0"),
])
def test_the_number_of_arguments_is_said_in_words(call: str, title: str) -> None:
    with pytest.raises(Failure) as caught:
        compile_metric(f"where(mean(p.n) > 0, {call}, 1)")
    assert [d.title for d in caught.value.diagnostics] == [title]
