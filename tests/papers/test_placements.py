"""The examples that follow papers compute the same numbers wherever their calls run: of the table of
`tests/papers/matrix.py`, two placements of each example, over two steps, with the same responses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.papers.matrix import EXAMPLES, PLACES, Found, compare, distance
from tests.papers.programs import root

pytestmark = pytest.mark.thorough
_PLACES = list(PLACES)
CHOSEN = {name: (_PLACES[i % len(_PLACES)], _PLACES[(i + 3) % len(_PLACES)]) for i, name in enumerate(EXAMPLES)}
CELLS = [(name, place) for name, places in CHOSEN.items() for place in places]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    return compare(root(tmp_path_factory.mktemp("placements")), CHOSEN, steps=2)


def test_every_placement_is_tried() -> None:
    assert min(Counter(place for _, place in CELLS)[place] for place in PLACES) >= 2


@pytest.mark.many
@pytest.mark.parametrize(("name", "place"), CELLS)
def test_the_placement_changes_no_number(found: dict[str, Found], name: str, place: str) -> None:
    alone, other = found[name], found[f"{name} {place}"]
    assert len(alone.steps) == 2 and alone.trained and (alone.seen or name == "pf_ppo")
    assert distance(other, alone) <= 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_steps_differ(found: dict[str, Found], name: str) -> None:
    """The comparison above is not one of constants."""
    first, second = found[name].steps
    assert first["actor/grad_norm"] != second["actor/grad_norm"]


def test_a_difference_is_noticed(found: dict[str, Found]) -> None:
    """A row that is seen once more, a token in a buffer, a weight, a metric."""
    one = found["raft_replay"]
    assert distance(one, one) == 0
    (key, *_), (weight, *_) = one.rows, one.trained
    assert distance(replace(one, seen=one.seen + Counter(["x"])), one) == float("inf")
    assert distance(replace(one, rows={**one.rows, key: one.rows[key] + 1}), one) == float("inf")
    assert distance(replace(one, trained={**one.trained, weight: one.trained[weight] + 0.1}), one) == float("inf")
    steps = [{**step, "reward": step["reward"] + 1e-3} for step in one.steps]
    assert 1 < distance(replace(one, steps=type(one.steps)(steps, one.steps.responses)), one) < float("inf")
