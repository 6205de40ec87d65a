"""One source of words: each highlighter names every keyword, unit, level and built-in of the language, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rldsl.highlight import RlfLexer
from tests.editors.words import builtins, in_patterns, keywords, levels, pygments, textmate, units, vim

EDITORS = Path(__file__).parents[2] / "grammar" / "editors"
FILES = {
    "textmate": EDITORS / "vscode/syntaxes/rlf.tmLanguage.json",
    "vim": EDITORS / "vim/syntax/rlf.vim",
}
PATTERNS: dict[str, list[str]] = {  # those that mark words as words
    "textmate": list(textmate(json.loads(FILES["textmate"].read_text()))),
    "vim": vim(FILES["vim"].read_text()),
    "pygments": pygments(RlfLexer.tokens),
}
WANTED = keywords() | units() | levels() | {"true", "false"}


@pytest.mark.parametrize("name", PATTERNS)
def test_every_word_is_known(name: str) -> None:
    assert WANTED - in_patterns(PATTERNS[name]) == set()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("word", sorted(WANTED))
def test_a_word_that_no_pattern_has_is_missed(name: str, word: str) -> None:
    """A longer word does not stand for it."""
    spelt = rf"((?:\\[bsn<]|\\z[se]|(?<![a-z_]))){word}(?![a-z_])"
    without = [re.sub(spelt, rf"\1{word}zz", p) for p in PATTERNS[name]]
    assert word not in in_patterns(without)


def test_comments_and_names_of_functions_do_not_count() -> None:
    assert list(textmate({"comment": "until", "patterns": [
        {"match": "\\b(where)\\(", "name": "support.function.builtin.rlf"},
        {"match": "\\buntil", "name": "keyword.control.rlf"}]})) == ["\\buntil"]
    assert vim('" where\nsyntax match rlfBuiltin /where/\nsyntax keyword rlfUnit tokens\n') == ["tokens"]
    assert in_patterns([r"\b(?:until|every)\b[a-z]*", r"\zsflow\>", "xtoken"]) == {"until", "every", "flow", "xtoken"}


@pytest.mark.parametrize("name", ["textmate", "vim"])
def test_built_in_functions_are_the_compilers(name: str, request: pytest.FixtureRequest) -> None:
    """`pytest --update-golden` writes them. Pygments highlights every called name as a function and needs no list."""
    text = FILES[name].read_text()
    listed = re.search(r"exp\\*\|[a-z0-9_\\|]*[a-z0-9_]", text)
    assert listed is not None
    if request.config.getoption("--update-golden"):
        between = "|" if name == "textmate" else "\\|"
        FILES[name].write_text(text.replace(listed[0], between.join(builtins())))
    else:
        assert re.split(r"\\*\|", listed[0]) == list(builtins()), "run pytest --update-golden tests/editors"


def test_the_extension_is_whole() -> None:
    package = json.loads((EDITORS / "vscode/package.json").read_text())
    for entry in (*package["contributes"]["grammars"], *package["contributes"]["languages"]):
        for key in ("path", "configuration"):
            if key in entry:
                json.loads((EDITORS / "vscode" / entry[key]).read_text())
    assert package["contributes"]["languages"][0]["extensions"] == [".rlf"]
