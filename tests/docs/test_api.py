"""The pages on Python are true: their code runs, and what they name is there."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

import rldsl
from tests.api.programs import make_files
from tests.docs.pages import ROOT

API = (ROOT / "docs/api.md").read_text()
HOW = ROOT / "docs/howto"


def code(page: str, name: str) -> str:
    """The fence after `<!-- py: NAME -->`."""
    found = re.search(rf"<!-- py: {name} -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with chdir(found := make_files(tmp_path_factory.mktemp("api"))):
        yield found


def test_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code(API, "api"), {})
    told = capsys.readouterr().out
    assert "small.rlf" in told and "predicted time of a step" in told and "no errors" not in told
    assert (folder / "small.html").is_file()


def test_the_page_on_notebooks_runs(folder: Path) -> None:
    text = (folder / "small.rlf").read_text()
    (folder / "ppo.rlf").write_text(text)
    exec(code((HOW / "notebook.md").read_text(), "notebook"), {})
    assert (folder / "ppo.plan").is_file()


def test_the_rewards_are_functions_of_rows(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(code((HOW / "rewards.md").read_text(), "rewards"))
    spec = importlib.util.spec_from_file_location("told", tmp_path / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.exact_match([{"completion": " 42", "answer": 42}, {"completion": "4", "answer": 42}]) == [1.0, 0.0]


def test_every_public_name_is_on_the_page() -> None:
    marked = set(" ".join(re.findall(r"<!-- api: (.*?) -->", API)).split())
    assert marked == set(rldsl.__all__)


@pytest.mark.parametrize("name", ["Plan", "Diagnostics", "Graph", "Memory", "Report", "Simulation"])
def test_every_member_is_on_the_page(name: str) -> None:
    kind = getattr(rldsl, name)
    own = {n for n in vars(kind) if not n.startswith("_") and n not in ("plan", "cluster", "lengths", "program")}
    own -= {"compiled", "folder", "texts", "redirection"} if name == "Plan" else {"name"}  # what it is made of
    section = API.partition("## Errors" if name == "Diagnostics" else f"## {name}")[2].partition("\n##")[0]
    missing = {n for n in own if not re.search(rf"`[^`]*\b{n}\b[^`]*`", section)}
    assert not missing


@pytest.mark.parametrize("name", ["check", "compile", "load"])
def test_signatures_are_those_of_the_code(name: str) -> None:
    row = next(line for line in API.splitlines() if line.startswith(f"| `{name}("))
    told = row.partition("`")[2].partition("`")[0].removeprefix(name).strip("()").split(", ")
    real = [str(p.replace(annotation=inspect.Parameter.empty)) for p in
            inspect.signature(getattr(rldsl, name)).parameters.values()]
    assert [word for word in told if word not in ("/", "*")] == real
