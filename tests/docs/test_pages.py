"""The documentation is true: its programs compile, its tables are those of the code, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rldsl.placement.degrees import OPTIONS
from rldsl.semantics import options as known
from rldsl.semantics.operators import NAMES
from tests.docs.pages import PAGES, ROOT, Program, dead_links, long_lines, mistakes, options, programs, table

LANGUAGE = (ROOT / "docs/language.md").read_text()
PROGRAMS = [p for page in PAGES for p in programs(page.name, page.read_text())]
TABLES = {"data": known.DATA, "models": known.MODEL, "adamw": known.ADAMW, "generate": known.GENERATE,
          "train": known.TRAIN, "checkpoint": known.CHECKPOINT}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}:{p.line}")
def test_programs_compile(program: Program, tmp_path: Path) -> None:
    assert not mistakes(program, tmp_path)


def test_there_are_programs_to_compile() -> None:
    assert len(PROGRAMS) >= 10 and {"README.md", "language.md"} <= {p.page for p in PROGRAMS}


def shown(option: known.Opt) -> str:
    """The default as the page writes it."""
    if option.needed:
        return "needed"
    if isinstance(option.default, bool):
        return str(option.default).lower()
    if isinstance(option.default, tuple):
        return f"[{', '.join(map(str, option.default))}]"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def differences(text: str, name: str) -> dict[str, tuple[str, str]]:
    """Where a table of the page and the code's differ: option -> (page, code)."""
    page, code = options(text, name), {k: shown(o) for k, o in TABLES[name].items()}
    told = {"kind": "by use", "minibatch": "", **dict.fromkeys(known.COLUMNS, "their own names")}  # no constant
    code |= {k: told[k] for k in code.keys() & told.keys()}
    code = {k: f"{float(v):g}" if re.fullmatch(r"[\d.e-]+", v) else v for k, v in code.items()}
    page = {k: f"{float(v):g}" if re.fullmatch(r"[\d.e-]+", v) else v for k, v in page.items()}
    return {k: (page.get(k, "missing"), code.get(k, "missing")) for k in page.keys() | code.keys()
            if page.get(k) != code.get(k)}


@pytest.mark.parametrize("name", TABLES)
def test_options_and_defaults_are_those_of_the_code(name: str) -> None:
    assert not differences(LANGUAGE, name)


def test_placement_options_are_those_of_the_code() -> None:
    assert set(options(LANGUAGE, "placement")) == set(OPTIONS)


def test_every_built_in_is_there() -> None:
    cells = " ".join(cell for cell, _ in table(LANGUAGE, "built-ins"))
    assert set(re.findall(r"`(\w+)\(", cells)) == NAMES


def test_every_keyword_is_there() -> None:
    grammar = re.sub(r"//[^\n]*", "", (ROOT / "grammar/rlf.lark").read_text())
    words = set(re.findall(r'"([a-z]+)"', grammar))
    assert {word for word, _ in table(LANGUAGE, "keywords")} == words


def test_examples_are_listed() -> None:
    listed = re.findall(r"\(\.\./examples/(\w+)\.rlf\)", (ROOT / "docs/examples.md").read_text())
    assert sorted(listed) == sorted(p.stem for p in (ROOT / "examples").glob("*.rlf"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_lines_are_short(page: Path) -> None:
    text = page.read_text()
    assert not dead_links(page, text) and not long_lines(text)


# ------------------------------------------------------------------------------------- these checks can fail


def test_a_broken_program_is_seen(tmp_path: Path) -> None:
    text = "```rlf\nparam a = b\n```\n\n<!-- rlf: flow -->\n```rlf\nkept = gem where reward > 0\n```\n"
    assert [mistakes(p, tmp_path) for p in programs("x", text)] == [["RL0101"], ["RL0101"]]


@pytest.mark.parametrize(("old", "new", "option"), [
    ("| `top_k` | 0 |", "| `top_k` | 1 |", "top_k"), ("| `greedy` | false |", "| `greedi` | false |", "greedi"),
    ("| `n` | 1 | sequences for each prompt |\n", "", "n"),
])
def test_a_wrong_table_is_seen(old: str, new: str, option: str) -> None:
    assert old in LANGUAGE and option in differences(LANGUAGE.replace(old, new), "generate")


def test_dead_links_are_seen() -> None:
    text = "# Here we are\n[a](gone.md) [b](pages.py) [c](#here-we-are) [d](#there) [e](https://example.org/gone)"
    assert dead_links(Path(__file__), text) == ["gone.md", "#there"]


def test_long_lines_are_seen() -> None:
    assert long_lines("x" * 121 + "\n| " + "y" * 130 + "\n" + "z" * 120) == [1]
