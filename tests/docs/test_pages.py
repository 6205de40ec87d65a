"""The documentation is true: its programs compile, its tables are those of the code, its links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from rldsl import api
from rldsl.cli import main
from rldsl.passes.pipeline import NAMES
from rldsl.placement.degrees import OPTIONS
from rldsl.placement.place import placements_of
from rldsl.plan.events import EVENTS
from rldsl.plan.heads import CALLS, HEADS, heads_with
from rldsl.plan.operators import BUILTINS
from rldsl.semantics import options as known
from rldsl.semantics.operators import INFIX
from rldsl.semantics.units import UNITS
from rldsl.source import SourceFile
from tests.docs.builtins import untrue
from tests.docs.commands import commands, refused
from tests.docs.pages import (
    FILES,
    PAGES,
    ROOT,
    Program,
    block,
    completed,
    dead_links,
    long_lines,
    mistakes,
    options,
    programs,
    table,
    words,
)

LANGUAGE = (ROOT / "docs/language.md").read_text()
DESIGN = (ROOT / "docs/design.md").read_text()
README = (ROOT / "README.md").read_text()
PROGRAMS = [p for page in PAGES for p in programs(page.name, page.read_text())]
TABLES = {"data": known.DATA, "hf": known.HF, "models": known.MODEL, "lora": known.LORA, "generate": known.GENERATE, "conversation": known.ENVIRONMENT,
          "optimizer": known.OPTIMIZER, **known.OPTIMIZERS, "group": known.GROUP,
          "train": known.TRAIN, "checkpoint": known.CHECKPOINT, "flow": known.FLOW, "cluster": known.CLUSTER}
TOLD = {"per_step": "all", "lag": "that of the flow", "kind": "by use", "minibatch": "", "answers": "one", "images": "none", "max_image_tokens": "none", "adamw_lr": "lr", "group": "as without it", **dict.fromkeys(known.COLUMNS, "their own names")}  # defaults by rule
BUILT_INS = [(call, row[1]) for row in table(LANGUAGE, "built-ins") for call in words(row[0])]
STATEMENT_WORDS = re.search(r"A\s+line\s+that\s+begins\s+with\s(.*?)\sis\s+always", LANGUAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what programs of the pages read."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}:{p.line}")
def test_programs_compile_or_fail_as_they_say(program: Program, tmp_path: Path) -> None:
    assert mistakes(program, tmp_path) == ([program.fails] if program.fails else [])


def test_there_are_programs_to_compile() -> None:
    pages = {p.page for p in PROGRAMS}
    assert {"README.md", "index.md", "tutorial.md", "language.md", "design.md", "data.md", "lora.md"} <= pages
    assert len(PROGRAMS) >= 45


def bare(program: str) -> list[str]:
    """A program without comments and the spaces that put them in columns."""
    lines = (re.sub(r"\s+", " ", re.sub(r"#.*", "", line)).strip() for line in program.splitlines())
    return [line for line in lines if line]


def test_readme_and_design_show_one_ppo() -> None:
    ppo = [bare(p.text) for p in PROGRAMS if p.page != "language.md" and "flow ppo(" in p.text]
    assert len(ppo) == 2 and ppo[0] == ppo[1]


# ---------------------------------------------------------------------------------------------------- tables


def shown(name: str, option: known.Opt) -> str:
    """The default as the page writes it."""
    if option.default is None and name in ("lr_scale", "weight_decay"):  # of a group
        return TOLD["group"]
    if name in TOLD and option.default != 0 or option.needed:
        return TOLD.get(name, "required")
    if isinstance(option.default, bool):
        return str(option.default).lower()
    if isinstance(option.default, tuple):
        return f"[{', '.join(map(str, option.default))}]"
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def normal(default: str) -> str:
    """One way to write a number."""
    return f"{float(default):g}" if re.fullmatch(r"[\d.]+(e-?\d+)?", default) else default


def differences(page: Mapping[str, str], code: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """option -> (default of the page, of the code), where they differ."""
    both = {k: (normal(page.get(k, "missing")), normal(code.get(k, "missing"))) for k in page.keys() | code.keys()}
    return {k: pair for k, pair in both.items() if pair[0] != pair[1]}


def in_code(name: str) -> dict[str, str]:
    return {k: shown(k, o) for k, o in TABLES[name].items()}


@pytest.mark.parametrize("name", TABLES)
def test_options_and_defaults_are_those_of_the_code(name: str) -> None:
    assert not differences(options(LANGUAGE, name), in_code(name))


def placed(clause: str) -> dict[str, str]:
    """Option -> what it is for a frozen model's call that is placed by `clause`, on 8 ranks."""
    text = completed("flow", f"other = slow.logprobs(gen) {clause}\nmetric other = mean(other)\n")
    place = placements_of(api.build_graph(SourceFile("page.rlf", text)))["other"]
    degrees = {k: str(getattr(place.layout, k)) for k in ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "backend")}
    return {**degrees, "mbs": str(place.mbs), "mbt": str(place.mbt), "recompute": place.recompute, "offload": str(place.offload).lower(),
            "keep": str(place.keep).lower(), "reuse": str(place.reuse).lower(), "waiting": place.waiting}


def test_placement_options_and_defaults_are_those_of_the_code(folder: Path) -> None:
    page = options(LANGUAGE, "placement")
    assert page.keys() == set(OPTIONS)
    made = placed("on mesh(0:8)")
    assert made.pop("dp") == "8" and page.pop("dp") == "the rest of the mesh"
    assert not differences({k: v for k, v in page.items() if v}, made)
    assert placed("on mesh(0:8) tp=2 pp=2")["dp"] == "2" and placed("on mesh(0:8) dp=2 tp=2")["pp"] == "2"


def test_placement_options_without_a_default_are_refused(folder: Path) -> None:
    for name in [k for k, v in options(LANGUAGE, "placement").items() if not v]:
        text = completed("placement", f"place ref.* on mesh(0:8) {name}=2\n")
        assert [d.code for d in api.check(text, "page.rlf")] == ["RL0312"], name


def test_the_table_of_built_ins_is_that_of_the_records(request: pytest.FixtureRequest) -> None:
    """`pytest --update-golden` writes it."""
    rows = [f"| `{call}` | {levels} | {meaning} |" for f in BUILTINS.values() for call, levels, meaning in f.signatures]
    wanted = "\n".join(("<!-- table: built-ins -->", "| | type | meaning |", "|---|---|---|", *rows)) + "\n\n"
    text = (ROOT / "docs/language.md").read_text()
    found = re.search(r"<!-- table: built-ins -->\n.*?\n\n", text, re.DOTALL)
    assert found is not None
    if request.config.getoption("--update-golden"):
        (ROOT / "docs/language.md").write_text(text.replace(found[0], wanted))
    else:
        assert found[0] == wanted, "run pytest --update-golden tests/docs/test_pages.py"


@pytest.mark.parametrize(("call", "type_"), BUILT_INS)
def test_built_ins_have_their_types(call: str, type_: str, folder: Path) -> None:
    assert not untrue(call, type_)


def test_every_operator_is_there() -> None:
    page = {word for row in table(LANGUAGE, "operators") for word in words(row[0])}
    assert page == {*INFIX, "not", "-x"}


def test_calls_are_those_of_the_heads() -> None:
    page = {(words(row[0])[0].partition(".")[2].partition("(")[0], (words(row[1]) or [""])[0], row[2].partition(":")[0])
            for row in table(LANGUAGE, "calls") if "`d.next()`" != row[0]}
    heads = {(o.call, h.name, o.level) for h in HEADS.values() for o in h.outputs}
    assert {p for p in page if p[0] not in ("generate", "train")} == heads
    assert {*CALLS} == {p[0] for p in page}
    assert [*heads_with("generate")] == [p[1] for p in page if p[0] == "generate"]


def test_the_prelude_is_there() -> None:
    page = {re.sub(r":\s*\w+", "", call) for row in table(LANGUAGE, "prelude") for call in words(row[0])}
    text = (ROOT / "stdlib/prelude.rlf").read_text()
    code = {re.sub(r":\s*\w+", "", call) for call in re.findall(r"^fn (\w+\(.*?\)) ->", text, re.MULTILINE)}
    assert page == code


def keywords() -> set[str]:
    grammar = re.sub(r"//[^\n]*", "", (ROOT / "grammar/rlf.lark").read_text())
    return {a or b for a, b in re.findall(r'"([a-z]+)"|/([a-z]+)\(\?=', grammar)}


def test_every_keyword_is_there() -> None:
    assert set(words(block(LANGUAGE, "keywords"))) == keywords()


def test_every_keyword_is_in_the_grammar_summary() -> None:
    summary = LANGUAGE.partition("## Grammar summary")[2].partition("```text\n")[2].partition("```")[0]
    assert keywords() <= set(re.findall(r"[a-z]+", summary))


def test_words_that_begin_a_statement_bind_no_name(folder: Path) -> None:
    assert STATEMENT_WORDS is not None
    begin = set(words(STATEMENT_WORDS[1]))
    for word in keywords() - BUILTINS.keys() - {"mesh", "not"}:
        found = [d.code for d in api.check(completed("flow", f"{word} = mean(reward)"), "page.rlf")]
        assert found == (["RL0001"] if word in begin else []), word


def test_units_are_there() -> None:
    text = LANGUAGE.partition("## Units")[2].partition("\n## ")[0]
    assert {w.split()[1] for w in words(text) if re.fullmatch(r"\d+ \w+", w)} == set(UNITS)


# ----------------------------------------------------------------------------------------------------- pages


def test_examples_are_listed() -> None:
    listed = re.findall(r"\(\.\./examples/(\w+)\.rlf\)", (ROOT / "docs/examples.md").read_text())
    assert sorted(listed) == sorted(p.stem for p in (ROOT / "examples").glob("*.rlf"))


def test_examples_are_described_as_in_their_first_line() -> None:
    page = dict(re.findall(r"^\| \[`(\w+)`\]\([^)]*\) \| (.*) \|$", (ROOT / "docs/examples.md").read_text(), re.MULTILINE))
    for file in (ROOT / "examples").glob("*.rlf"):
        first, second = file.read_text().split("\n")[:2]
        if not second.startswith("#"):
            assert f"# {page[file.stem]}" == first


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_lines_are_short(page: Path) -> None:
    text = page.read_text()
    assert not dead_links(page, text) and not long_lines(text)


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "design.md"], ids=lambda p: p.name)
def test_pages_for_users_speak_of_sequences(page: Path) -> None:
    assert not re.search(r"\bframes?\b", page.read_text(), re.IGNORECASE)


def test_the_readme_lists_every_command() -> None:
    listed = listed_commands(README)
    assert listed == set(main.commands)


def listed_commands(readme: str) -> set[str]:
    """Commands of `rlc` in the section "Commands"."""
    section = readme.partition("\n## Commands\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^rlc ([\w-]+)", "\n".join(commands(section)), re.MULTILINE))


def test_every_heading_is_in_the_contents() -> None:
    contents = LANGUAGE.partition("Contents:")[2].partition("\n\n")[0]
    heads = re.findall(r"^## (.+)$", LANGUAGE, re.MULTILINE)
    assert re.findall(r"\(#([\w-]+)\)", contents) == [h.lower().replace(" ", "-") for h in heads]


def test_the_design_knows_every_event() -> None:
    listed = re.search(r"Event kinds: `([a-z\s]+)`", DESIGN)
    assert listed is not None and listed[1].split() == list(EVENTS)


def test_the_design_knows_every_pass() -> None:
    table = DESIGN.partition("| pass | adds |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == NAMES


def test_the_design_knows_every_keyword() -> None:
    text = DESIGN.partition("Keywords are few")[2].partition("This must compile")[0]
    assert set(" ".join(words(text)).split()) == keywords()


def test_the_tree_of_the_design_is_there() -> None:
    tree = DESIGN.partition("## 8. Tree")[2].partition("```")[2].partition("```")[0]
    own = {p.name for p in (ROOT / "rldsl").iterdir() if (p.is_dir() or p.suffix == ".py") and p.name[0] not in "_."}
    named = set(re.findall(r"\b[a-z_]+\.py\b|\b[a-z_]+(?=/)", re.sub(r"\([^)]*later\)", "", tree)))
    assert own <= named and all(any(ROOT.glob(f"**/{n}")) for n in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_there(page: Path, folder: Path) -> None:
    assert not refused(page.read_text(), folder)


def test_there_are_commands() -> None:
    found = [line for page in PAGES for line in commands(page.read_text())]
    assert sum(line.startswith("rlc ") for line in found) > 40 and sum(" rldsl.run " in line for line in found) > 3


# ------------------------------------------------------------------------------------- these checks can fail


@pytest.mark.parametrize("line", [
    "rlc new grpo my.rlf", "rlc simulate ppo.rlf", "rlc check --mend ppo.rlf", "rlc show ppo.plan --rank two",
    "rlc show", "make demos", "python examples/small.py runs/tiny",
    "torchrun --nproc-per-node 2 \\\n    -m rldsl.run ppo.plan --output x",
])
@pytest.mark.parametrize("language", ["", "bash"])
def test_unknown_commands_are_seen(line: str, language: str, folder: Path) -> None:
    text = f"```{language}\nrlc check ppo.rlf\n{line}\n```\n\n```text\nrlc nothing\n```\n"
    assert len(refused(text, folder)) == 1


def test_a_broken_program_is_seen(tmp_path: Path) -> None:
    text = ("<!-- rlf: declarations -->\n```rlf\nparam a = b\n```\n\n"
            "<!-- rlf: flow -->\n```rlf\nk = gem where 1 > 0\n```\n")
    assert [mistakes(p, tmp_path) for p in programs("x", text)] == [["RL0101"], ["RL0101"]]


def test_a_broken_placement_is_seen(tmp_path: Path) -> None:
    text = "<!-- rlf: placement -->\n```rlf\nplace actor.generate on mesh(0:8) dp=3\n```\n"
    assert [mistakes(p, tmp_path) for p in programs("x", text)] == [["RL0304"]]


def test_a_program_that_ought_to_fail_and_does_not_is_seen(tmp_path: Path) -> None:
    (program,) = programs("x", "<!-- rlf: flow fails RL0218 -->\n```rlf\nmetric a = count(gen)\n```\n")
    assert program.fails == "RL0218" and mistakes(program, tmp_path) == []


@pytest.mark.parametrize("text", ["```rlf\nparam a = 1\n```\n", "<!-- rlf: elsewhere -->\n```rlf\nparam a = 1\n```\n"])
def test_a_fragment_without_context_is_seen(text: str) -> None:
    with pytest.raises(ValueError, match="context"):
        list(programs("x", text))


@pytest.mark.parametrize(("name", "old", "new", "option"), [
    ("generate", "| `top_k` | 0 |", "| `top_k` | 1 |", "top_k"),
    ("generate", "| `greedy` | false |", "| `greedi` | false |", "greedi"),
    ("generate", "| `greedy` | false |", "| `greedi` | false |", "greedy"),
    ("generate", "| `n` | 1 | sequences per prompt |\n", "", "n"),
    ("optimizer", "| `lr` | required |", "| `lr` | 1e-6 |", "lr"),
    ("data", "`answer`, `chosen`", "`chosen`", "answer"),
    ("train", "| `minibatch` | |", "| `minibatch` | 1 |", "minibatch"),
    ("cluster", "| `gpus` | required |", "| `gpus` | 8 |", "gpus"),
    ("flow", "| `seed` | 1 |", "| `seed` | 0 |", "seed"),
])
def test_a_wrong_table_is_seen(name: str, old: str, new: str, option: str) -> None:
    assert LANGUAGE.count(old) == 1
    assert option in differences(options(LANGUAGE.replace(old, new), name), in_code(name))


def test_a_missing_table_is_seen() -> None:
    with pytest.raises(ValueError, match="no table train"):
        options("<!-- table: data -->\n| | |\n|---|---|\n| `a` | 1 |\n", "train")


@pytest.mark.parametrize(("call", "type_"), [
    ("next(x)", "token -> seq"), ("next(x)", "seq -> seq"), ("last(x)", "token -> token"), ("last(x)", "F -> seq"),
    ("exp(x)", "F -> F"), ("sum(x)", "L -> batch"), ("sum(x by M)", "F -> F"), ("uniform(x)", "L -> L"),
    ("len(gen)", "sequences -> token"), ("quantile(x, q)", "F, batch -> F"), ("abs(x, y)", "L, L -> L"),
    ("at_end(s)", "prompt -> token"), ("nothing(x)", "L -> L"),
])
def test_a_wrong_type_is_seen(call: str, type_: str, folder: Path) -> None:
    assert untrue(call, type_)


@pytest.mark.parametrize(("old", "new", "missing", "extra"), [
    ("\nrlc verify ", "\nrlc check ", {"verify"}, set()),
    ("\nrlc lsp ", "\nrlc speak ", {"lsp"}, {"speak"}),
    ("\n## Commands\n", "\n## Details\n", set(main.commands), set()),
])
def test_a_wrong_list_of_commands_is_seen(old: str, new: str, missing: set[str], extra: set[str]) -> None:
    assert README.count(old) == 1
    found, real = listed_commands(README.replace(old, new)), set(main.commands)
    assert (real - found, found - real) == (missing, extra)


def test_dead_links_are_seen() -> None:
    text = ("# Here we are\n[a](gone.md) [b](pages.py) [c](#here-we-are) [d](#there) [e](https://example.org/gone)\n"
            "[f](../../docs/language.md#units) [g](../../docs/language.md#unit)\n```\n# there\n```\n")
    assert dead_links(Path(__file__), text) == ["gone.md", "#there", "../../docs/language.md#unit"]
    pictures = '<img src="gone.png" alt="x"><img src="pages.py"> `<img src="code.png">`\n![x](lost.png)\n'
    assert dead_links(Path(__file__), pictures) == ["lost.png", "gone.png"]


def test_long_lines_are_seen() -> None:
    assert long_lines("x" * 121 + "\n| " + "y" * 130 + "\n" + "z" * 120) == [1]
