"""docs/howto/add-a-backend.md: the package of the page, found by its entry point, computes what the others do."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.howto.copies import PAGES, Copy, product_files
from tests.samples import thorough_between
from tests.tiny import make_all

PAGE = "add-a-backend.md"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    made = Copy(tmp_path_factory.mktemp("backend"), PAGE)
    make_all(made.root)
    installed(made.root / "whole", made.root / "site")
    return made


def installed(project: Path, site: Path, version: str = "0.1") -> None:
    """As `pip install --editable`: the distribution's metadata, and the way to its packages."""
    given = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = site / f"{given['name'].replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {given['name']}\nVersion: {version}\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
             for group, entries in given["entry-points"].items()]
    (info / "entry_points.txt").write_text("".join(lines))


def both(copy: Copy) -> str:
    return f"{copy.root / 'site'}:{copy.root / 'whole'}"


def test_it_changes_no_file_of_the_product() -> None:
    assert product_files((PAGES / PAGE).read_text()) == []


@pytest.mark.thorough
def test_it_computes_what_the_torch_backend_does(copy: Copy) -> None:
    copy.rlc("compile", "kl.rlf", "-o", "kl.plan", PYTHONPATH=both(copy))
    assert '"backend":"whole"' in (copy.root / "kl.plan").read_text()
    copy.ranks(2, "kl.plan", "--out", "out", PYTHONPATH=both(copy))
    found = json.loads((copy.root / "out/metrics.jsonl").read_text())
    assert found["difference"] < 1e-5 < found["entropy"]


def changed(copy: Copy, old: str, new: str) -> str:
    text = (copy.root / "kl.rlf").read_text()
    assert old in text
    text = text.replace(old, new)
    if "value_model" in new:
        text = text.replace("ref.logprobs", "ref.values").replace("ref.entropy", "ref.values")
    if "train" in new:
        text = text.removesuffix("}\n") + "  ref.train(gen, loss=sft()) on mesh(0:2) dp=2 backend=whole\n}\n"
        text = "use std.sft (sft)\n" + text
    (copy.root / "wrong.rlf").write_text(text)
    return "wrong.rlf"


@pytest.mark.parametrize("old, new, words", thorough_between([
    ("n=2, max_new_tokens=8)  on mesh(0:2) dp=2", "n=2)  on mesh(0:2) dp=2 backend=whole",
     "does not support `generate`"),
    ("dp=2 backend=whole", "tp=2 backend=whole", "does not support `tp`"),
    ('model ref     = causal_lm("models/sft")', 'model ref     = causal_lm("models/sft") train adamw(lr=1e-4)',
     "does not support `train`"),
    ('ref     = causal_lm("models/sft")', 'ref     = value_model("models/sft")', "the head of a value_model")]))
def test_what_it_cannot_do_is_refused(copy: Copy, old: str, new: str, words: str) -> None:
    said = copy.rlc("compile", changed(copy, old, new), "-o", "x.plan", fails=True, PYTHONPATH=both(copy))
    assert "RL0327" in said and words in said


def test_without_the_entry_point_there_is_no_such_backend(copy: Copy) -> None:
    said = copy.rlc("check", "kl.rlf", fails=True, PYTHONPATH=str(copy.root / "whole"))
    assert "RL0312" in said and "unknown backend `whole`" in said


def test_an_entry_point_without_its_package_is_refused(copy: Copy) -> None:
    said = copy.rlc("check", "kl.rlf", fails=True, PYTHONPATH=str(copy.root / "site"))
    assert "RL0326" in said and "its package rldsl_whole cannot be imported" in said


def test_two_packages_of_one_name_are_refused(copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    project = (copy.root / "whole/pyproject.toml").read_text()
    (tmp_path / "other/pyproject.toml").write_text(project.replace("rldsl-whole", "other")
                                                   .replace("rldsl_whole", "other_whole"))
    installed(tmp_path / "other", tmp_path / "site")
    said = copy.rlc("check", "kl.rlf", fails=True, PYTHONPATH=f"{both(copy)}:{tmp_path / 'site'}")
    assert "RL0326" in said and "several packages provide it: other_whole, rldsl_whole" in said
