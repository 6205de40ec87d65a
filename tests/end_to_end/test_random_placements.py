"""Placements drawn at random, 54 in all: each gives the numbers of one rank. More: `placements.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.end_to_end.placements import CALLS, WORLD, alone, differences, drawn, runs
from tests.samples import thorough_unless
from tests.tiny import make_all

EACH = {"ppo": 10, "grpo": 18, "dpo": 26}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True)


@pytest.mark.thorough
@pytest.mark.many
@pytest.mark.parametrize("name", thorough_unless(lambda name: name == "grpo", CALLS))
def test_the_placement_never_changes_numbers(name: str, tiny: Path, tmp_path: Path) -> None:
    draw = random.Random(11)
    expected = alone(name, tiny, tmp_path)
    several = [drawn(name, tiny, tmp_path, draw) for _ in range(EACH[name])]
    assert len({x.place for x in several}) == EACH[name]
    for one, found in zip(several, runs([x.plan for x in several], tmp_path, WORLD, expected)):
        assert not (wrong := differences(found, expected)), one.place + "\n".join(wrong)
    assert expected[0]["actor/loss"] != expected[-1]["actor/loss"], "something moved"
