"""Parts of the language server that need no client: edits by lines, definitions in Python files, forms."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rldsl.lsp.edits import line_edits
from rldsl.lsp.python_files import candidates, definition
from rldsl.lsp.writing import SNIPPETS
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse_recovering

TEXTS = st.lists(st.sampled_from(["a", "b", "  c", "", "d\u2028e"]), max_size=8).map("\n".join)


@given(TEXTS, TEXTS)
def test_edits_make_the_new_text(before: str, after: str) -> None:
    text, moved = before, 0
    for start, end, new in line_edits(before, after):
        text = text[: start + moved] + new + text[end + moved :]
        moved += len(new) - (end - start)
    assert text == after and (before != after or not line_edits(before, after))


def test_lines_that_are_equal_are_left_alone() -> None:
    assert line_edits("a\nb\nc\n", "a\nB\nc\n") == [(2, 4, "B\n")]


FILE = "import os\nTABLE = 3\ndef f(rows): pass\nclass Env:\n    def inner(self): pass\nasync def g(): pass\n" \
       "def f(rows): return 1\n"


@pytest.mark.parametrize("name, place", [("f", (6, 4)), ("Env", (3, 6)), ("g", (5, 10)), ("TABLE", (1, 0)),
                                         ("inner", None), ("os", None), ("h", None)])
def test_a_name_in_a_python_file(name: str, place: tuple[int, int] | None) -> None:
    found = definition(name, ["a.py"], lambda _: FILE)
    assert found == (("a.py", *place) if place else None)


def test_files_that_cannot_be_read_or_parsed_are_passed_over() -> None:
    texts = {"broken.py": "def f(:", "null.py": "\0", "b.py": "def f(): pass"}
    assert definition("f", ["none.py", "broken.py", "null.py", "b.py"], texts.get) == ("b.py", 0, 4)
    assert definition("f", [], texts.get) is None


def test_where_a_path_may_be() -> None:
    assert candidates("r.py", ["/a", "/b"]) == ["/a/r.py", "/b/r.py"] and candidates("/r.py", ["/a"]) == ["/r.py"]
    [own] = candidates("std/rewards.py", ["/a"])
    assert own.endswith("stdlib/rewards.py")


@pytest.mark.parametrize("word", SNIPPETS)
def test_forms_are_right_as_they_are(word: str) -> None:
    text = re.sub(r"\$\{\d+:((?:[^{}]|\{[^{}]*\})*)\}", r"\1", SNIPPETS[word]).replace("$0", "stop when 1 > 2")
    if word == "fn":
        text = text.replace("stop when 1 > 2", "r")
    inside = word in ("eval", "every", "checkpoint")
    program = f"flow f(steps=1) {{\n{text}\n}}\n" if inside else f"{text}\n"
    _, broken = parse_recovering(SourceFile("a.rlf", program))
    assert not broken, (program, broken)
