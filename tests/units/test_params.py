"""`param name: TYPE = default`: types, defaults, --set and placement files."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl.api import check
from rldsl.cli import main
from rldsl.diag import Diagnostic, Failure
from rldsl.graph.build import build
from rldsl.plan.expr import Scalar
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse

REST = '''
data d = jsonl("d.jsonl", batch=4)
model actor = causal_lm("m")
flow f(steps=2) {
  p = d.next()
  gen = actor.generate(p)
}
'''


def value(decl: str, place: str = "", **sets: Scalar) -> Scalar:
    rules = parse(SourceFile("place.rlf", place)) if place else None
    return dict(build(parse(SourceFile("main.rlf", decl + REST)), sets, rules).params)["x"]


def errors(decl: str, place: str = "", **sets: Scalar) -> tuple[Diagnostic, ...]:
    with pytest.raises(Failure) as caught:
        value(decl, place, **sets)
    return caught.value.diagnostics


@pytest.mark.parametrize(("decl", "sets", "expected"), [
    ("param x: number = 0.5", {}, 0.5), ("param x: number = 3", {}, 3.0), ("param x: int = 4k", {}, 4000),
    ("param x: text = \"a\"", {}, "a"), ("param x: bool = true", {}, True), ("param x = 3", {}, 3),
    ("param x: number", {"x": "1e-3"}, 1e-3), ("param x: number", {"x": "2"}, 2.0),
    ("param x: int", {"x": "1_000"}, 1000),
    ("param x: int", {"x": "2M"}, 2_000_000), ("param x: text", {"x": "12"}, "12"),
    ("param x: bool", {"x": "False"}, False),
    ("param x: number = 3", {"x": "0.5"}, 0.5), ("param x = 3", {"x": "-5"}, -5), ("param x: int", {"x": 7}, 7),
    ("param x = 512 prompts", {"x": "64"}, 64), ("param x = 512 prompts", {"x": "64 prompts"}, 64),
])
def test_values(decl: str, sets: dict[str, Scalar], expected: Scalar) -> None:
    found = value(decl, **sets)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("decl", "sets", "code", "underlined", "part"), [
    ("param x: int = 0.5", {}, "RL0205", "0.5", "an integer"),
    ("param x: number = \"a\"", {}, "RL0205", '"a"', "a number"),
    ("param x: number = true", {}, "RL0205", "true", "a number"),
    ("param x: text = 3", {}, "RL0205", "3", "a string"),
    ("param x: bool = 1", {}, "RL0205", "1", "true or false"),
    ("param x: int = \"3\"", {"x": "3"}, "RL0205", '"3"', "an integer"),
    ("param x: float = 3", {}, "RL0101", "float", "number"),
    ("param x: txt", {"x": "a"}, "RL0101", "txt", "`text`"),
    ("param x", {}, "RL0215", "param x", "neither a type nor a default"),
    ("param x", {"x": "3"}, "RL0215", "param x", "param x: number"),
    ("param x: text", {}, "RL0113", "x", "rlc compile main.rlf --set x=..."),
    ("param x: int", {"x": "1.5"}, "RL0205", "1.5", "declared as `int`"),
    ("param x: int = 3", {"x": "many"}, "RL0205", "many", "an integer"),
    ("param x: number", {"x": "fast"}, "RL0205", "fast", "a number"),
    ("param x: number", {"x": "."}, "RL0205", ".", "a number"),
    ("param x: number", {"x": True}, "RL0205", "True", "a number"),
    ("param x: bool = true", {"x": "1"}, "RL0205", "1", "true or false"),
    ("param x = 3", {"x": "0.5"}, "RL0205", "0.5", "the default is 3"),
    ("param x = 512 prompts", {"x": "64 tokens"}, "RL0218", "64 tokens", "counts prompts"),
    ("param x: int = 3", {"xx": "1"}, "RL0106", "xx", "`x`"),
])
def test_mistakes(decl: str, sets: dict[str, Scalar], code: str, underlined: str, part: str) -> None:
    [d] = errors(decl, **sets)
    assert d.code == code and (d.span.text if d.span else "") == underlined, d
    assert part in " ".join((d.title, d.label, d.help, *(x.text for x in d.labels)))


def test_a_missing_value_is_told_once_however_often_it_is_used() -> None:
    [d] = errors("param x: int\nparam y = x + 1\nparam z = x * y")
    assert d.code == "RL0113"


def test_every_missing_value_is_told() -> None:
    assert [d.code for d in errors("param x: int\nparam y: text")] == ["RL0113", "RL0113"]


def test_a_placement_file_gives_the_value_and_set_wins() -> None:
    assert value("param x: int", "param x = 3") == 3
    assert value("param x: int", "param x = 3", x="4") == 4
    assert value("param x: number", "param x = 3\nmesh m = mesh(0:2)") == 3.0


@pytest.mark.parametrize(("decl", "place", "code", "underlined"), [
    ("param x: int", "param x = 0.5", "RL0205", "0.5"),
    ("param x: int", "param x: number", "RL0113", "x"),
    ("param x: int", "param x: nmber = 3", "RL0101", "nmber"),
    ("param x: int = 1", "param x = 3", "RL0102", "x"),
    ("param x: int", "param y = 3", "RL0113", "x"),
])
def test_mistakes_of_a_placement_file(decl: str, place: str, code: str, underlined: str) -> None:
    [d] = errors(decl, place)
    assert d.code == code and d.span is not None and d.span.text == underlined


def test_check_says_the_same() -> None:
    [d] = check("param x: text" + REST, "run.rlf")
    assert d.code == "RL0113" and d.help == "`rlc compile run.rlf --set x=...`"
    assert check("param x: text" + REST, "run.rlf", sets={"x": "a"}) == ()


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.rlf").write_text("param x: int" + REST)
    missing = CliRunner().invoke(main, ["check", "p.rlf"])
    assert missing.exit_code == 1 and "rlc compile p.rlf --set x=..." in missing.output
    assert CliRunner().invoke(main, ["check", "p.rlf", "--set", "x=3"]).exit_code == 0
    assert CliRunner().invoke(main, ["check", "p.rlf", "--set", "x=three"]).exit_code == 1
