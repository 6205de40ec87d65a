"""Free ranks change no number: the same losses as with the ranks in order, and as on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import compare
from tests.relabelled.programs import program
from tests.tiny import make_all


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=3)


def run(folder: Path, train: str, generate: str, mesh: str, ranks: int, like: Metrics | None = None) -> Metrics:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "p.rlf").write_text(program(train, generate, mesh, ranks))
    return run_program(folder / "p.rlf", {}, folder / "run", like=like)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tiny)
        return run(tmp_path_factory.mktemp("one"), "dp=1", "dp=1", "mesh(0:1)", 1)


@pytest.mark.thorough
@pytest.mark.parametrize("train, generate", [("tp=4", "dp=2 tp=2"), ("dp=2 tp=2", "tp=4"), ("pp=2 tp=2", "tp=2 dp=2")])
def test_losses_are_the_same(train: str, generate: str, tiny: Path, alone: Metrics, tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    compare(run(tmp_path, train, generate, "mesh(4)", 4, alone), alone)
