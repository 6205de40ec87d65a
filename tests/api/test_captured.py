"""Functions of a script become the text of a module: it defines the same functions, or says why not."""

from __future__ import annotations

import json as j
import linecache
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import PurePath as Pure
from types import ModuleType
from typing import Annotated, Any, Literal, get_type_hints

import pytest

from rldsl.diag import Failure
from rldsl.python.captured import captured

DIGITS = re.compile(r"\d+", re.IGNORECASE)
TABLE = {"one": 1, "more": [2, (3, 4.5)]}
LIMIT = math.inf
stream = object()
renamed = len


class Grader:
    scale = len(TABLE)

    def grade(self, text: str) -> float:
        return self.scale * math.sqrt(len(DIGITS.findall(text)))


def clean(text: str) -> str:
    return text.strip()


same = clean


def exact(rows: list[dict[str, str]], bonus: float = TABLE["one"]) -> list[float]:
    """Uses everything that can be captured."""
    stream = Counter(row["completion"] for row in rows)  # a local name hides the global object
    j.dumps(TABLE)
    return [Grader().grade(clean(text)) + bonus + len(Pure(text).parts) for text in stream]


def countdown(rows: list[Any], n: int = 2) -> list[int]:
    return countdown(rows, n - 1) if n else [len(rows)] * renamed(rows)


def nested(rows: list[Any]) -> list[int]:
    def inner(stream: int) -> int:
        return stream + 1

    return [inner(2) for _ in rows]


def test_the_text_defines_the_same_functions() -> None:
    text = captured({"exact": exact, "countdown": countdown, "nested": nested}).text
    module: dict[str, Any] = {}
    exec(compile(text, "module", "exec"), module)
    rows = [{"completion": "12 and 3 "}, {"completion": "a/b"}]
    for function in (exact, countdown, nested):
        assert module[function.__name__](rows) == function(rows)
    assert "stream" not in module and module["DIGITS"].flags == DIGITS.flags
    assert text == captured({"exact": exact, "countdown": countdown, "nested": nested}).text


Move = Literal["up", "down"]
MAXIMUM = 3


class Board:
    def __init__(self) -> None:
        self.moves: list[str] = []


class Game(Board):
    """An environment: the types of its tools are read when it runs."""

    def move(self, to: Literal["up", "down"], steps: Annotated[int, "at most 3"] = 1) -> str:
        self.moves.append(to)
        return f"{to} {min(steps, MAXIMUM)}"


class Aliased:
    def move(self, to: Move) -> str:
        return to


def test_an_environment_with_the_types_of_its_tools() -> None:
    module: dict[str, Any] = {"__name__": "game"}
    exec(compile(captured({"Game": Game}).text, "game", "exec"), module)
    game = module["Game"]()
    assert game.move("up", 9) == "up 3" and game.moves == ["up"]
    found = get_type_hints(module["Game"].move, module, include_extras=True)
    assert found["to"] == Literal["up", "down"] and found["steps"] == Annotated[int, "at most 3"]


def test_classes_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell is a file of its own in `linecache`, which Python does not know to be that of `__main__`."""
    cell = "import math\n\nclass Cell:\n    size = 2\n\n    def area(self):\n        return math.prod([self.size, self.size])\n"
    linecache.cache["<cell 7>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 7>")
    main = ModuleType("__main__")
    exec(compile(cell, "<cell 7>", "exec"), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    module: dict[str, Any] = {}
    exec(captured({"Cell": main.Cell}).text, module)
    assert module["Cell"]().area() == 4


def closure() -> Callable[..., Any]:
    k = 3

    def outside(rows: list[Any]) -> list[int]:
        return [k for _ in rows]

    return outside


def uses_an_object(rows: list[Any]) -> list[Any]:
    return [stream for _ in rows]


def uses_infinity(rows: list[Any]) -> list[float]:
    return [LIMIT for _ in rows]


def uses_another_name(rows: list[Any]) -> list[str]:
    return [same(row) for row in rows]


@pytest.mark.parametrize(("name", "function", "why"), [
    ("outside", closure(), "`outside` uses `k` of the function around it"),
    ("uses_an_object", uses_an_object, "it uses `stream`, which is an `object`"),
    ("uses_infinity", uses_infinity, "it uses `LIMIT`"),
    ("uses_another_name", uses_another_name, "`same` is another name of `clean`"),
    ("other", exact, "the function is called `exact`"),
    ("f", lambda rows: rows, "the function is a lambda"),
    ("len", len, "not a function defined with `def`"),
    ("Aliased", Aliased, "it uses `Move`, which is a `_LiteralGenericAlias`"),
    ("Other", Game, "the class is called `Game`"),
    ("game", Game(), "it is a `Game`, not a function defined with `def`, and no class"),
    ("made", eval("lambda: 0", {}), "a lambda"),
])
def test_what_cannot_be_captured(name: str, function: Callable[..., Any], why: str) -> None:
    with pytest.raises(Failure) as caught:
        captured({name: function})
    (found,) = caught.value.diagnostics
    assert found.code == "RL0790" and why in found.notes[0]


def test_source_that_is_not_known() -> None:
    scope: dict[str, Any] = {}
    exec("def typed(rows):\n    return rows", scope)
    with pytest.raises(Failure) as caught:
        captured({"typed": scope["typed"]})
    assert "is not known" in caught.value.diagnostics[0].notes[0]
