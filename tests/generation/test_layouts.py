"""Generation under tp, pp and dp: what one full forward pass for every token gives. One world of four for all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rldsl.backends.torch.generate.captured_step import CaptureSwitch
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import plan_model, ragged
from tests.backend_torch.test_forward import _partial
from tests.generation.reference import Row, expected, made, rows_of, same
from tests.tiny import make_model
from tests.world import run_world

PROMPTS = [p for p, _ in ragged(5, 46, seed=1) for _ in range(2)]
DRAWN = Sampling(max_new_tokens=6, temperature=1.3, top_k=30)
LAYOUTS = [(1, 2, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)]
WORK: dict[str, tuple[Sampling, int, dict[str, Any]]] = {
    "all at once": (DRAWN, 0, {}),
    "few slots": (DRAWN, 5, {"poll_every": 3}),
    "fewer slots than stages": (DRAWN, 3, {}),
    "one slot": (replace(DRAWN, max_new_tokens=4), 1, {}),
    "plain": (DRAWN, 6, {"capture": CaptureSwitch(False)}),
    "greedy": (replace(DRAWN, greedy=True), 4, {"poll_every": 100}),
    "stop": (replace(DRAWN, stop=("b", "5"), min_new_tokens=2), 4, {}),
    "one token": (replace(DRAWN, max_new_tokens=1), 3, {}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("m") / "m"))


def _ranks(rank: int, path: str) -> list[tuple[Any, str, list[int], list[Row]]]:
    """(layout, work, rows, what was generated for them); of dp=2 the second shard has no rows."""
    model, found = plan_model(path), []
    for layout in LAYOUTS:
        shard = _partial(model, rank, *layout)
        if shard is None:
            continue
        empty = layout[0] > 1 and shard.axes.dp.index == 1
        rows = [] if empty else list(range(len(PROMPTS)))
        for name, (sampling, limit, how) in WORK.items():
            out = made(shard, [PROMPTS[r] for r in rows], sampling, limit, rows, **how)
            found.append((layout, name, rows, rows_of(out)))
    return found


@pytest.mark.thorough
@pytest.mark.many
def test_every_layout_gives_the_same(path: str) -> None:
    right = {name: expected(path, PROMPTS, sampling) for name, (sampling, _, _) in WORK.items()}
    seen = 0
    for layout, name, rows, found in (x for rank in run_world(4, _ranks, path) for x in rank):
        assert same(found, [right[name][r] for r in rows]), (layout, name)
        seen += 1
    assert seen == sum(a * b * c for a, b, c in LAYOUTS) * len(WORK)
