"""The grammar on valid programs: every construct, exact spans, and Lark's own strictness."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lark import Lark

from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import grammar, parse

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted([*ROOT.glob("examples/*.rlf"), *ROOT.glob("stdlib/*.rlf")])


def first(text: str) -> ast.Declaration:
    return parse(SourceFile("t.rlf", text)).items[0]


def statement(text: str) -> ast.Statement:
    return first(f"flow f(steps=1) {{\n{text}\n}}\n").body[0]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.name)
def test_every_program_parses(path):
    assert parse(SourceFile(str(path), path.read_text())).items


def test_the_grammar_is_strict():
    """No conflict, and no two terminals that match the same text where both may stand."""
    Lark(grammar(), parser="lalr", maybe_placeholders=True, strict=True)


def test_every_snippet_of_the_design_and_of_the_reference_parses():
    found = 0
    for page in ("docs/design.md", "docs/language.md", "README.md"):
        for block in re.findall(r"```(?:rlf)?\n(.*?)```", (ROOT / page).read_text(), re.S):
            if re.match(r"(#[^\n]*\n)*\s*(use|param|fn|loss|mesh|model|flow|data|cluster) ", block):
                parse(SourceFile(page, block))
                found += 1
    assert found >= 6


def test_the_promised_statement():
    made = statement("gen = actor.generate(prompt) on mesh(0:8) dp=4 pp=2")
    assert isinstance(made, ast.Assign) and made.targets[0].name == "gen"
    assert [(o.name.name, o.value.value) for o in made.clause.options] == [("dp", 4), ("pp", 2)]
    assert made.clause.mesh.func.name == "mesh" and isinstance(made.clause.mesh.args[0].value, ast.Range)


@pytest.mark.parametrize("text, value", [("12", 12), ("1_000", 1000), ("1e-6", 1e-6), ("4k", 4000), ("2M", 2_000_000),
                                         ("0.5", 0.5), ("1.5k", 1500)])
def test_numbers(text, value):
    made = first(f"param x = {text}").default.value
    assert made == value and type(made) is type(value)


@pytest.mark.parametrize("text, shape", [
    ("a + b * c", "(a + (b * c))"), ("a - b - c", "((a - b) - c)"), ("-a ** b", "(-(a ** b))"),
    ("a < b and not c or d", "(((a < b) and (not c)) or d)"), ("(a + b) * c", "((a + b) * c)"),
    ("-a * b", "((-a) * b)"), ("a ** b ** c", "(a ** (b ** c))"),
])
def test_precedence(text, shape):
    assert show(statement(f"x = {text}").value) == shape


def show(e: ast.Expr) -> str:
    match e:
        case ast.Binary():
            return f"({show(e.left)} {e.op} {show(e.right)})"
        case ast.Unary(op="-"):
            return f"(-{show(e.operand)})"
        case ast.Unary():
            return f"(not {show(e.operand)})"
        case _:
            return e.span.text


def test_newlines_are_free_inside_brackets_and_end_statements_outside():
    body = first("flow f(steps=1) {\n  a = g(x,\n        y)   # comment\n\n  b = [1,\n    2]\n}\n").body
    assert [s.targets[0].name for s in body] == ["a", "b"]


def test_keywords_are_names_where_a_name_stands():
    body = first("flow f(steps=1) {\n  train = data.save(on, by)\n  m.train(train, loss=use)\n}\n").body
    assert body[0].targets[0].name == "train" and body[1].value.func.name.name == "train"


def test_spans_are_exact():
    source = SourceFile("t.rlf", "param a = 1\nflow f(steps=1) {\n  x = foo(a, b=2) on all dp=4\n}\n")
    made = parse(source).items[1].body[0]
    assert made.value.span.text == "foo(a, b=2)" and made.clause.span.text == "on all dp=4"
    assert made.value.args[1].span.text == "b=2" and str(made.targets[0].span) == "t.rlf:3:3"


def test_docs_are_the_comment_above():
    made = first("# One.\n# Two.\nfn f(x: token) -> token {\n  return x\n}\n")
    assert made.doc == "One.\nTwo." and [p.level.name for p in made.params] == ["token"]


@pytest.mark.parametrize("selector", ["actor.train", "actor.*", "*.logprobs", "*.*", "@gen"])
def test_selectors(selector):
    assert first(f"place {selector} on all dp=8 offload=true").selector == selector
