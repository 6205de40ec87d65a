"""What an answer costs: the server's own work on a page, counted in calls of functions, and what it does not do again.

The bound of the design is 100 ms of CPU for an answer: some 600,000 calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl.graph.build import read_text
from rldsl.lsp.analysis import Analysis, analyze
from rldsl.lsp.complete import complete
from rldsl.lsp.describe import hover
from rldsl.lsp.hints import hints
from rldsl.lsp.lens import lenses
from rldsl.lsp.library import Library, read_file
from rldsl.lsp.outline import folds, outline
from rldsl.lsp.text import Lines
from rldsl.lsp.tokens import encode
from rldsl.semantics.modules import library
from tests.effort import calls

BOUND = 300_000  # calls
PAGE = Path(__file__).parents[2] / "examples" / "ppo_full.rlf"


@pytest.fixture(scope="module")
def page() -> tuple[Library, str, Analysis]:
    files, text = Library(read_file), PAGE.read_text()
    for module in library():
        files.load(f"std.{module}", "")
    return files, text, analyze(str(PAGE), text, files, read_text)


def test_an_answer_is_little_work(page: tuple[Library, str, Analysis]) -> None:
    files, text, known = page
    at, count = text.index("actor.train"), [0]

    def typed() -> Analysis:
        count[0] += 1
        return analyze(str(PAGE), text + "\n" * count[0], files, read_text)

    occurrence = known.index.at(at)
    assert occurrence is not None
    costs = {"a text that has changed": calls(typed),
             "completion": calls(lambda: complete(text, at, known.index, known.facts, files)),
             "hover": calls(lambda: hover(occurrence.symbol, known.facts)),
             "code lenses": calls(lambda: lenses(known, None)), "hints": calls(lambda: hints(known)),
             "colors": calls(lambda: encode(known.index, Lines(text))),
             "outline": calls(lambda: outline(known.index)), "folding": calls(lambda: folds(text))}
    assert max(costs.values()) < BOUND, costs


def test_files_that_stay_are_read_into_trees_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import rldsl.lsp.library as own

    parsed: list[str] = []

    def parse(source):  # type: ignore[no-untyped-def]
        parsed.append(source.name)
        return real(source)

    real = own.parse
    monkeypatch.setattr(own, "parse", parse)
    files, text = Library(read_file), PAGE.read_text()
    analyze(str(PAGE), text, files, read_text)
    assert parsed and len(parsed) == len(set(parsed))
    before = len(parsed)
    analyze(str(PAGE), text + "\n", files, read_text)
    assert len(parsed) == before


def test_a_file_has_one_name_whoever_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor's server runs in the folder of the programs, where the compiler names files relative to it."""
    monkeypatch.chdir(tmp_path)
    mine, main = tmp_path / "mine.rlf", tmp_path / "main.rlf"
    mine.write_text("fn double(x: seq) -> seq {\n  return 2 * x\n}\n")
    files = Library(read_file)
    importer = files.of(str(main), 'use "mine.rlf" (double)\n')
    (symbol,) = files.of(str(mine), mine.read_text()).names.values()
    assert [o.span.text for o in importer.uses(symbol)] == ["double"]


def test_programs_are_looked_for_where_people_write_them(tmp_path: Path) -> None:
    from rldsl.lsp.session import programs

    for name in ("a.rlf", "sub/b.rlf", ".venv/c.rlf", "node_modules/d.rlf", "runs/e.rlf", "f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert sorted(Path(p).name for p in programs(str(tmp_path))) == ["a.rlf", "b.rlf"]
