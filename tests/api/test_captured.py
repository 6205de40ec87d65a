"""Functions of a script become the text of a module: it defines the same functions, or says why not."""

from __future__ import annotations

import json as j
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import PurePath as Pure
from typing import Any

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
    text = captured({"exact": exact, "countdown": countdown, "nested": nested})
    module: dict[str, Any] = {}
    exec(compile(text, "module", "exec"), module)
    rows = [{"completion": "12 and 3 "}, {"completion": "a/b"}]
    for function in (exact, countdown, nested):
        assert module[function.__name__](rows) == function(rows)
    assert "stream" not in module and module["DIGITS"].flags == DIGITS.flags
    assert text == captured({"exact": exact, "countdown": countdown, "nested": nested})


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
