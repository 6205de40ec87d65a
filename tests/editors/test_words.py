"""One source of words: each highlighter names every keyword, unit, level and built-in of the language, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.editors.words import builtins, keywords, levels, units

EDITORS = Path(__file__).parents[2] / "grammar" / "editors"
FILES = {
    "textmate": EDITORS / "vscode/syntaxes/rlf.tmLanguage.json",
    "vim": EDITORS / "vim/syntax/rlf.vim",
    "pygments": EDITORS.parents[1] / "rldsl/highlight.py",
}


@pytest.mark.parametrize("name", FILES)
def test_every_word_is_known(name: str) -> None:
    text = set(re.findall(r"[a-z0-9_]+", FILES[name].read_text()))
    text |= {w[n:] for w in text for n in (1, 2)}  # after \b, \s, \zs
    assert keywords() | units() | levels() | {"true", "false"} <= text


@pytest.mark.parametrize("name", ["textmate", "vim"])
def test_built_in_functions_are_the_compilers(name: str) -> None:
    """Pygments highlights every called name as a function and needs no list."""
    text = FILES[name].read_text()
    listed = re.search(r"\(exp\\*\|([a-z0-9_\\|]+)", text)
    assert listed is not None
    assert {"exp", *re.split(r"\\*\|", listed[1].rstrip("\\"))} == builtins()


def test_the_extension_is_whole() -> None:
    package = json.loads((EDITORS / "vscode/package.json").read_text())
    for entry in (*package["contributes"]["grammars"], *package["contributes"]["languages"]):
        for key in ("path", "configuration"):
            if key in entry:
                json.loads((EDITORS / "vscode" / entry[key]).read_text())
    assert package["contributes"]["languages"][0]["extensions"] == [".rlf"]


def test_a_new_keyword_would_be_missed() -> None:
    """The comparison can fail."""
    text = set(re.findall(r"[a-z]+", FILES["vim"].read_text()))
    assert not keywords() | {"whilst"} <= text
