"""Highlighters on real text: Pygments on every program, TextMate by its own test tool, Vim headless."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Error, Keyword, Name, Operator, Token

from rldsl.highlight import RlfLexer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EDITORS = ROOT / "grammar" / "editors"
PROGRAMS = sorted([*ROOT.glob("examples/*.rlf"), *ROOT.glob("stdlib/*.rlf"), *ROOT.glob("rldsl/starters/*.rlf")])


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_pygments_has_a_token_for_everything(path: Path) -> None:
    text = path.read_text()
    tokens = list(RlfLexer(stripnl=False, ensurenl=False).get_tokens(text))
    assert "".join(value for _, value in tokens) == text
    assert [value for kind, value in tokens if kind is Error] == []


def kinds(text: str) -> dict[str, type[Token]]:
    return {value: kind for kind, value in RlfLexer().get_tokens(text) if value.strip()}


def test_pygments_knows_words_by_their_place() -> None:
    found = kinds("flow f(steps=3) {\n  actor.train(gen, loss=l()) on all dp=2\n}\nmodel m = causal_lm(p) train adamw(lr=1)")
    assert found["flow"] is Keyword.Declaration and found["on"] is Keyword and found["dp"] is Name.Variable
    assert kinds("flow f() {\n a.train(g)\n}")["train"] is Name.Function
    assert kinds("model m = causal_lm(p) train adamw(lr=1)")["train"] is Keyword
    assert kinds("flow f() {\n x = where(a, b, c)\n}")["where"] is Name.Function
    assert kinds("flow f() {\n x = gen where a > b\n}")["where"] is Keyword
    assert kinds("flow f() {\n x = mean(r by prompt)\n}")["by"] is Operator.Word
    assert kinds('use py "a.py" (ask: gen -> prompts?(max_tokens=8))')["?"] is Operator


@pytest.mark.parametrize(("text", "words"), [
    ("use std.sft (sft)", ["use"]),
    ("use  std.sft (sft)", ["use"]),
    ('use "mine.rlf" (half)', ["use"]),
    ('use py "judge.py" (judge: gen -> seq)', ["use", "py"]),
    ("use python (x)", ["use"]),
    ("use = 1", []),
    ("py = 1", []),
])
def test_pygments_knows_imports(text: str, words: list[str]) -> None:
    found = [value for kind, value in RlfLexer().get_tokens(text) if kind is Keyword.Namespace]
    assert found == words


def test_pygments_finds_the_lexer_itself() -> None:
    assert get_lexer_for_filename("ppo.rlf").name == get_lexer_by_name("rlf").name == "rlf"


def test_pygments_marks_what_is_not_the_language() -> None:
    assert Error in kinds("flow f() { x = 1 ? 2 }").values()


# ------------------------------------------------------------------------------------------------- textmate


@pytest.fixture(scope="session")
def tmgrammar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vscode-tmgrammar-test, from the registry of npm."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    folder = tmp_path_factory.mktemp("npm")
    made = subprocess.run(["npm", "install", "--no-audit", "--no-fund", "vscode-tmgrammar-test@0.1.3"], cwd=folder,
                          capture_output=True, text=True, timeout=120)
    if made.returncode:
        pytest.skip("vscode-tmgrammar-test cannot be installed here")
    return folder / "node_modules" / ".bin" / "vscode-tmgrammar-test"


def run(tool: Path, program: Path) -> subprocess.CompletedProcess[str]:
    grammar = EDITORS / "vscode/syntaxes/rlf.tmLanguage.json"
    return subprocess.run([str(tool), "-g", str(grammar), str(program)], capture_output=True, text=True, timeout=60)


@pytest.mark.thorough
def test_textmate_scopes(tmgrammar: Path) -> None:
    done = run(tmgrammar, HERE / "textmate/program.rlf")
    assert done.returncode == 0, done.stdout


def test_the_textmate_test_can_fail(tmgrammar: Path, tmp_path: Path) -> None:
    text = (HERE / "textmate/program.rlf").read_text().replace("keyword.other.unit.rlf", "comment.line.rlf")
    (tmp_path / "wrong.rlf").write_text(text)
    assert run(tmgrammar, tmp_path / "wrong.rlf").returncode != 0


# ------------------------------------------------------------------------------------------------------ vim

VIM = """flow f(steps=3) {  # note
  gen = actor.generate(prompt, n=8 sequences) on mesh(0:8) dp=4
  actor.train(gen, loss=l(x=mean(r by prompt)))
  kept = gen where "a" == where(r, 1, 2)
  every 100 { save actor }
}
"""
# (line, a word of it, its occurrence from 1, its group)
GROUPS = [
    (1, "flow", 1, "rlfDeclaration"), (1, "# note", 1, "rlfComment"), (1, "steps", 1, "rlfOption"),
    (1, "3", 1, "rlfNumber"), (2, "generate", 1, "rlfCall"), (2, "sequences", 1, "rlfUnit"), (2, "on", 1, "rlfKeyword"),
    (2, "mesh", 1, "rlfSource"), (3, "train", 1, "rlfCall"), (3, "mean", 1, "rlfBuiltin"), (3, "by", 1, "rlfWord"),
    (3, "prompt", 1, "rlfLevel"), (4, "where", 1, "rlfKeyword"), (4, '"a"', 1, "rlfString"), (4, "where", 2, "rlfBuiltin"),
    (5, "every", 1, "rlfKeyword"), (5, "save", 1, "rlfKeyword"),
]


def place(text: str, line: int, word: str, nth: int = 1) -> tuple[int, int]:
    """(line, column) of the nth occurrence of a word in a line, from 1."""
    at = -1
    for _ in range(nth):
        at = text.splitlines()[line - 1].index(word, at + 1)
    return line, at + 1


def vim_groups(file: Path, places: list[tuple[int, int]], settings: str = "") -> list[str]:
    """The type that Vim gives a file, and the groups of places in it."""
    script, out = file.parent / "run.vim", file.parent / "out.txt"
    script.write_text(
        f"set nocompatible\nset runtimepath^={EDITORS / 'vim'}\n{settings}\nfiletype plugin on\nsyntax on\n"
        f"edit {file}\nlet found = [&filetype]\n"
        + "".join(f"call add(found, synIDattr(synID({a}, {b}, 1), 'name'))\n" for a, b in places)
        + f"call writefile(found, '{out}')\nqa!\n")
    subprocess.run(["vim", "-es", "-u", "NONE", "-S", str(script)], timeout=60, stdin=subprocess.DEVNULL)
    return out.read_text().splitlines()


@pytest.mark.skipif(shutil.which("vim") is None, reason="no vim on this machine")
def test_vim_groups(tmp_path: Path) -> None:
    (tmp_path / "t.rlf").write_text(VIM)
    found = vim_groups(tmp_path / "t.rlf", [place(VIM, *g[:3]) for g in GROUPS])
    assert found[0] == "rlf"
    assert list(zip([g[:3] for g in GROUPS], found[1:])) == [(g[:3], g[3]) for g in GROUPS]


# ------------------------------------------------------------------------------------------------- markdown

MARKDOWN = f"flow text\n\n```rlf\n{VIM}```\n\nflow text\n\n```python\nflow = 1\n```\n"
FENCED = (1, 1, 3 + len(VIM.splitlines()) + 3, 3 + len(VIM.splitlines()) + 6)  # lines that are not of the language


@pytest.mark.skipif(shutil.which("vim") is None, reason="no vim on this machine")
def test_vim_knows_blocks_of_markdown(tmp_path: Path) -> None:
    (tmp_path / "t.md").write_text(MARKDOWN)
    inside = [place(MARKDOWN, line + 3, word, nth) for line, word, nth, _ in GROUPS]
    found = vim_groups(tmp_path / "t.md", [*inside, *((line, 1) for line in FENCED)],
                       "let g:markdown_fenced_languages = ['rlf']")
    if found[0] != "markdown":
        pytest.skip("this vim has no syntax files")
    assert found[1 : len(GROUPS) + 1] == [g[3] for g in GROUPS]
    assert not [g for g in found[len(GROUPS) + 1 :] if g.startswith("rlf")]


def test_textmate_knows_blocks_of_markdown(tmgrammar: Path, tmp_path: Path) -> None:
    """By the injection that package.json declares, into a grammar that knows no blocks."""
    markdown = tmp_path / "markdown.json"
    markdown.write_text('{"scopeName": "text.html.markdown", "patterns": []}')
    text = ('// SYNTAX TEST "text.html.markdown" "blocks"\nflow text\n// <--- - storage.type.function.rlf\n```rlf\n'
            "flow f(steps=3) {\n// <--- storage.type.function.rlf\n```\nflow text\n"
            "// <--- - storage.type.function.rlf\n")
    for expected in (text, text.replace("--- storage.type", "--- comment")):
        (tmp_path / "t.md").write_text(expected)
        done = subprocess.run([str(tmgrammar), "--config", str(EDITORS / "vscode/package.json"), "-g", str(markdown),
                               str(tmp_path / "t.md")], capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0) == (expected == text), done.stdout + done.stderr


def test_pygments_colors_blocks_by_their_name() -> None:
    markdown = get_lexer_by_name("markdown")
    found = {value: kind for kind, value in markdown.get_tokens("```rlf\nflow f(steps=3) {\n}\n```\n")}
    assert found["flow"] is Keyword.Declaration
