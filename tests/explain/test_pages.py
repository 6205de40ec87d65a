"""The pages of `rlc explain`: every code of the sources has one, and every program in them does what it says. The
messages of the broken ones are golden files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl import api, explain
from rldsl.cli import main
from rldsl.diag import Diagnostic, Failure
from rldsl.explain.show import listing, show
from rldsl.report import render
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]
EXAMPLES = [(code, i) for code in explain.codes() for i in range(len(explain.page(code).examples))]


def uses() -> set[str]:
    """Every code that stands in a source file of ours, the pages aside."""
    files = [p for top in ("rldsl", "backends") for p in (ROOT / top).rglob("*.py") if "explain" not in p.parts]
    return {code for p in files for code in re.findall(r"\"(RL\d{4})\"", p.read_text())}


def test_every_code_has_a_page_and_every_page_a_use() -> None:
    assert uses() == set(explain.codes())


def test_codes_lie_in_their_ranges() -> None:
    assert all(code[:4] in explain.RANGES for code in explain.codes())


def test_titles_are_messages() -> None:
    titles = explain.codes()
    assert len(set(titles.values())) == len(titles)
    for code, title in titles.items():
        assert title == title.strip() and not title.endswith(".") and len(title) < 80, code


def test_pages_of_mistakes_in_programs_have_examples() -> None:
    """Codes of syntax, names, types, placement, memory and lints: those of files and other commands aside."""
    for code in explain.codes():
        if code[:4] in ("RL01", "RL02", "RL03", "RL04", "RL09") or code < "RL0090":
            assert any(e.role == "broken" for e in explain.page(code).examples), code


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models that the examples name: two of one family and tokenizer and different sizes, and
    one of another family."""
    folder = tmp_path_factory.mktemp("explain")
    make_model(folder / "tiny")
    make_model(folder / "small", num_hidden_layers=2)
    make_model(folder / "gpt2", "gpt2")
    return folder


def found(page: explain.Page, example: explain.Example, folder: Path) -> tuple[Diagnostic, ...]:
    """What checking or compiling the example says."""
    for name, text in (*page.files, ("page.rlf", example.text)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    options = list(example.options)
    sets = dict(options.pop(options.index("--set") + 1).split("=") for _ in range(options.count("--set")))
    place = options[options.index("--place") + 1] if "--place" in options else None
    if not example.compile:
        return api.examine(example.text, "page.rlf", sets=sets, place=api.read_source(place) if place else None)
    assert not api.check(example.text, "page.rlf", sets=sets), "`compile` is for what `check` cannot find"
    try:
        api.compile("page.rlf", sets, place)
    except Failure as failure:
        return failure.diagnostics
    return ()


@pytest.mark.parametrize("code, number", EXAMPLES, ids=[f"{c}-{i}" for c, i in EXAMPLES])
def test_examples(code: str, number: int, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch,
                  golden: Callable[[str, str], None]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for model in models.iterdir():
        (tmp_path / "models" / model.name).symlink_to(model)
    if code == "RL0326":  # whatever is installed here
        monkeypatch.setattr("rldsl.placement.backends.lacking", lambda known: known.needs[1] if known.needs else "")
    elif code == "RL0912":
        monkeypatch.setenv("RLDSL_VLLM_PYTHON", "python")
    page = explain.page(code)
    example = page.examples[number]
    said = found(page, example, tmp_path)
    if example.role == "broken":
        assert [d.code for d in said] == [code], said
        text = render(said).replace(str(tmp_path), "/work") + "\n"
        if code == "RL0303":  # what the installed transformers says is its own
            text = re.sub(r"(\^+) .*", r"\1 ...", text)
        golden(f"diagnostics/pages/{code}.txt", text)
    else:
        assert not [d for d in said if d.severity == "error" or d.code == code], said


def test_a_fix_is_another_program() -> None:
    for code in explain.codes():
        texts = [e.text + " ".join(e.options) for e in explain.page(code).examples]
        assert len(set(texts)) == len(texts), code


@pytest.mark.parametrize("text", ["", "RL0001: no hash\n", "# RL01: short\n", "#RL0101: x\n"])
def test_malformed_pages_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        explain.parse(text)


def test_form_of_a_page() -> None:
    page = explain.parse("# RL0101: a title\n\nwhy\n\n```py r.py\nx = 1\n```\n\n```rlf broken --set a=1\np\n```\n"
                         "```rlf fixed compile\nq\n```\n```\nplain\n```\n")
    assert (page.code, page.title, page.files) == ("RL0101", "a title", (("r.py", "x = 1\n"),))
    assert page.examples == (explain.Example("broken", "p\n", ("--set", "a=1")),
                             explain.Example("fixed", "q\n", (), True))
    shown = show(page)
    assert "fails with `rlc check --set a=1`" in shown and "    p\n" in shown and "```" not in shown
    assert "\033[" not in shown and "\033[" in show(page, color=True)


@pytest.mark.parametrize("word", ["RL0304", "rl0304", "0304", "304", " RL304 "])
def test_a_code_may_be_typed_in_many_ways(word: str) -> None:
    assert explain.normal(word) == "RL0304"


def test_the_command() -> None:
    run = CliRunner().invoke
    said = run(main, ["explain", "rl304"])
    assert said.exit_code == 0 and "degrees do not fill the mesh" in said.output and "dp=2 tp=4" in said.output
    assert run(main, ["explain"]).output == listing(explain.codes())
    unknown = run(main, ["explain", "RL0399"])
    assert unknown.exit_code == 2 and "did you mean RL03" in unknown.output and "Traceback" not in unknown.output
    assert run(main, ["explain", "banana"]).exit_code == 2
