"""`median`, `quantile` and `uniform` on three processes are those of one, also where a rank has no rows; a new step or seed draws
new numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rldsl.plan.expr import Node, Program
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.ragged_index import FrameRows
from tests.frames import frame
from tests.world import run_world

LENS = [3, 1, 4, 0, 5, 9]
FRAMES = {"gen": frame("gen", "gen", "prompt", len(LENS), 2, "d", 8, 99)}
CODE = Program("p", (
    Node("input", (), "token", "gen", (("name", "x"),)), Node("const", attrs=(("value", 0.3),)),
    Node("quantile", (0, 1), "batch", "", (("to", "batch"),)),
    Node("uniform", (), "token", "gen", (("call", "u"), ("frame", "gen"))),
    Node("median", (0,), "batch", "", (("to", "batch"),)), Node("add", (2, 4))), (("q", 5), ("u", 3)))


def found(rows: list[int], group: Any, seed: int = 7, step: int = 3) -> tuple[float, list[list[float]]]:
    x = torch.randn(sum(LENS), generator=torch.Generator().manual_seed(1), dtype=torch.float64).split(LENS)
    at = torch.tensor(rows, dtype=torch.int64)
    lens = torch.tensor([LENS[r] for r in rows], dtype=torch.int64)
    mine = torch.cat([x[r] for r in rows]) if rows else x[0][:0]
    out = run_compute(CODE, {"x": mine}, {"gen": FrameRows(at, at // 2, lens)}, FRAMES, group, lambda node: mine, seed, step)
    return float(out["q"]), [u.tolist() for u in out["u"].split(lens.tolist())]


def part(rank: int, shares: list[list[int]]) -> tuple[float, list[list[float]]]:
    import torch.distributed as dist
    return found(shares[rank], dist.group.WORLD)


@pytest.mark.parametrize("shares", [[[0, 1], [4, 5], [2, 3]], [[0, 1, 2, 3], [], [4, 5]]])
def test_three_ranks_are_one(shares: list[list[int]]) -> None:
    q, u = found(list(range(6)), None)
    for rank, (mine, numbers) in enumerate(run_world(3, part, shares)):
        assert mine == q
        assert [x for x in numbers if x] == [u[r] for r in shares[rank] if u[r]]


@pytest.mark.parametrize(("seed", "step"), [(8, 3), (7, 4)])
def test_seed_and_step_draw_anew(seed: int, step: int) -> None:
    rows = list(range(6))
    assert found(rows, None)[1] == found(rows, None)[1] != found(rows, None, seed, step)[1]
