"""What the tests of `rlc search` and `rlc explain-placement` type, and where."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.placement.place import place_graph
from tests.search.programs import GRPO, describe

EIGHT = "cluster nodes=1 gpus=8\n"
PROGRAM = GRPO.replace("cluster nodes=1 gpus=1\n", EIGHT)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of 1B models on a node of eight, without directories."""
    monkeypatch.setattr("rldsl.commands.search.describe", describe("1B"))
    monkeypatch.setattr("rldsl.placement.place.place_graph", partial(place_graph, describe=describe("1B")))
    (tmp_path / "grpo.rlf").write_text(PROGRAM)
    (tmp_path / "two.yaml").write_text("preset: h100x8\ngpus: 2\n")
    (tmp_path / "bare.yaml").write_text("gpus: 8\nmemory_gb: 80\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def searched(*arguments: str, program: str = "grpo.rlf") -> str:
    said = rlc("search", program, "--cluster", "two.yaml", *arguments)
    assert said.exit_code == 0, said.output
    return said.output
