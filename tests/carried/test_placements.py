"""Responses that continue in later steps are the same on every placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.carried.programs import MORE, grpo
from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import HERE, compare, everywhere, placement
from tests.samples import thorough_between
from tests.tiny import make_all

ONE = "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n"
PLACES = {
    "uneven": everywhere(4, "dp=4", "actor"),  # 5 prompts on 4 ranks
    "more_ranks_than_prompts": everywhere(6, "dp=6", "actor"),
    "tp_pp": everywhere(4, "tp=2 pp=2 mbs=3", "actor"),
    "disjoint": placement(4, actor_generate="on mesh(0:2) dp=2 mbs=3", actor_train="on mesh(2:4) tp=2"),
}
LAGGED = {
    "colocated": everywhere(2, "dp=2", "actor", "ref"),
    "disjoint": placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) dp=2 zero=1", **{
        "ref_*": "on mesh(1:2)"}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def run(tiny: Path, folder: Path, text: str, place: str, like: Metrics | None = None) -> Metrics:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recorder.py").write_text((HERE / "rewards_small.py").read_text())
    (folder / "carried.rlf").write_text(text)
    return run_program(folder / "carried.rlf", {"base": str(tiny / "models/sft"),
                                                "rows": str(tiny / "data/prompts.jsonl")}, folder, place, like=like)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return run(tiny, tmp_path_factory.mktemp("alone"), grpo(), ONE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_between(PLACES))
def test_the_placement_changes_nothing(name: str, tiny: Path, alone: Metrics, tmp_path: Path) -> None:
    compare(run(tiny, tmp_path, grpo(), PLACES[name], alone), alone)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAGGED)
def test_nor_does_it_with_a_lag(name: str, tiny: Path, tmp_path: Path) -> None:
    text = MORE.format(flow=", lag=2", more="")
    one = run(tiny, tmp_path / "one", text, ONE)
    assert one[-1]["late"] > 2
    compare(run(tiny, tmp_path / name, text, LAGGED[name], one), one)
