"""A few hundred inputs of the fuzzer, always the same; `python -m tests.fuzz.run` runs many."""

from __future__ import annotations

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse, parse_recovering
from tests.fuzz.generate import mutate, programs, sensible
from tests.fuzz.run import make, run

FIRST = 7_000_000  # numbers that the long runs do not reach


@pytest.mark.thorough
@pytest.mark.parametrize("start", range(FIRST, FIRST + 400, 50))
def test_every_input_gets_an_answer(start: int) -> None:
    total = run(start, 50)
    assert total.count == 50
    assert not total.failures, "\n".join(f"{kind}, number {n}\n{text}\n{wrong}" for kind, n, text, wrong in total.failures)


@pytest.mark.thorough
def test_generated_programs_parse() -> None:
    seen: set[str] = set()
    for seed in range(300):
        try:
            file = parse(SourceFile("x.rlf", programs(seed)))
        except Failure as failure:
            raise AssertionError(f"seed {seed}: {failure}\n{programs(seed)}") from None
        seen.update(type(node).__name__ for node in walk(file.items))
    wanted = {t.__name__ for union in (ast.Expr, ast.Statement, ast.Declaration) for t in union.__args__}
    assert wanted <= seen, wanted - seen


def test_generated_programs_have_comments_at_odd_places() -> None:
    texts = [programs(seed) for seed in range(100)]
    lines = [line for text in texts for line in text.splitlines()]
    assert any(line.lstrip().startswith("#") for line in lines)
    assert any("(" in line.split("#")[0] and "#" in line and line.count("(") > line.count(")") for line in lines)


@pytest.mark.thorough
def test_sensible_programs_are_often_right() -> None:
    """Else the deep parts of the checker would never be reached."""
    right = sum(not api.check(sensible(seed), "x.rlf") for seed in range(120))
    assert right >= 20, right


def test_mutations_are_a_function_of_the_seed() -> None:
    text = programs(1)
    assert mutate(3, text) == mutate(3, text) and programs(4) == programs(4) and sensible(5) == sensible(5)
    assert len({mutate(seed, text) for seed in range(50)}) > 40
    assert {make(n)[0] for n in range(5)} == {"grammar", "sensible", "page mutated", "sensible mutated", "grammar mutated"}


@pytest.mark.parametrize("text", [
    "", "\n", "#", "\x00", "(", '"', "'", "}", "flow", "flow f", "flow f {", "\ufeff", "param a = 1e999\n", "\\", "@",
    "param a = " + "9" * 5000, "param a = 2M ** 2M\n", "param a = 2 ** 2 ** 2 ** 2 ** 9\n", "place @ on mesh(0:2)\n",
    "param a = \"\\x1\"\n", "param a = \"a\rb\"\n", "use std. (a)\n", "use std.ppo ()\n", "model m = 3\n",
    "cluster nodes=16384 gpus=256\nflow f(steps=1) {\n}\n", "mesh m = mesh(0:99999999999999)\nflow f(steps=1) {\n}\n",
    "data d = x\nflow f(steps=1) {\n}\n", "model m = causal_lm(\"a\") train 3\nflow f(steps=1) {\n}\n", "flow f(steps=1) { }",
])
def test_texts_that_once_were_trouble(text: str) -> None:
    for d in api.examine(text, "x.rlf"):
        assert d.span is not None and 0 <= d.span.start <= d.span.end <= len(d.span.file.text)
    parse_recovering(SourceFile("x.rlf", text))


def walk(node: object):
    if isinstance(node, tuple):
        for part in node:
            yield from walk(part)
    elif isinstance(node, ast.Tree):
        yield node
        for name in type(node).__dataclass_fields__:
            yield from walk(getattr(node, name))
