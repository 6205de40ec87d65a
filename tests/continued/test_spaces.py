"""Reductions and broadcasting between the spaces of a tree against loops over rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from rldsl.plan.expr import Node, Program
from rldsl.plan.model import Frame, Space, Spread
from rldsl.plan.spaces import indexed
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.ragged_index import FrameRows
from rldsl.sharding.partition import rows_by_dp

FANS = (3, 2, 4)
TREE = [Space("p", 5)]
for name, fan in zip("abc", FANS):
    TREE.append(Space(name, TREE[-1].count * fan, TREE[-1].id, fan))
SPACES = {s.id: s for s in TREE}
FRAMES = {x: indexed(Frame(x, x, "d", 8, 9), SPACES) for x in "pabc"}


def at_hand(own: str, rows: Sequence[int], lens: Sequence[int]) -> dict[str, FrameRows]:
    return {own: FrameRows(torch.tensor(rows), torch.tensor(rows) // FRAMES[own].per_prompt, torch.tensor(lens))}


def value(program: list[Node], rows: dict[str, FrameRows], **inputs: torch.Tensor) -> list[float]:
    made = Program("p", tuple(program), (("out", len(program) - 1),))
    found = run_compute(made, inputs, rows, FRAMES, None, lambda node: torch.zeros(0))["out"]
    return found.tolist()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("to, per", [("b", 4), ("a", 8), ("p", 24)])
@pytest.mark.parametrize("op", ["sum", "mean", "amax", "count"])
def test_reductions_of_any_number_of_steps(seed: int, to: str, per: int, op: str) -> None:
    draw = random.Random(seed)
    rows = sorted(draw.sample(range(SPACES["c"].count), 50))
    x = [draw.random() for _ in rows]
    level = "prompt" if to == "p" else "seq"
    nodes = [Node("input", (), "seq", "c", (("name", "x"),)), Node(op, (0,), level, to, (("to", "prompt"),))]
    groups: dict[int, list[float]] = {}
    for row, number in zip(rows, x):
        groups.setdefault(row // per, []).append(number)
    right = {"sum": sum, "mean": lambda v: sum(v) / len(v), "amax": max, "count": len}[op]
    found = value(nodes, at_hand("c", rows, [1] * len(rows)), x=torch.tensor(x))
    assert found == pytest.approx([right(groups[g]) for g in sorted(groups)], rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("of, per", [("b", 4), ("a", 8), ("p", 24)])
def test_values_of_ancestors_reach_tokens(seed: int, of: str, per: int) -> None:
    draw = random.Random(seed)
    rows = sorted(draw.sample(range(SPACES["c"].count), 20))
    lens = [draw.randrange(4) for _ in rows]
    parents = sorted({r // per for r in rows})
    y, x = [draw.random() for _ in parents], [draw.random() for _ in range(sum(lens))]
    nodes = [Node("input", (), "token", "c", (("name", "x"),)),
             Node("input", (), "prompt" if of == "p" else "seq", of, (("name", "y"),)), Node("mul", (0, 1), "token", "c")]
    each = [y[parents.index(r // per)] for r, n in zip(rows, lens) for _ in range(n)]
    found = value(nodes, at_hand("c", rows, lens), x=torch.tensor(x), y=torch.tensor(y))
    assert found == pytest.approx([a * b for a, b in zip(x, each)], rel=1e-6)


@pytest.mark.parametrize("frame, granularity, per", [("c", "row", 1), ("c", "prompt", 4), ("b", "prompt", 2),
                                                     ("a", "prompt", 3), ("a", "row", 1)])
@pytest.mark.parametrize("dp", [1, 2, 3, 7])
def test_who_has_rows_has_their_ancestors(frame: str, granularity: str, per: int, dp: int) -> None:
    spread = Spread("s", "m", "L", (frame,), granularity, "tokens")  # type: ignore[arg-type]
    lengths = {f: [1 + (7 * r) % 5 for r in range(FRAMES[f].count)] for f in "pabc"}
    divided = rows_by_dp(spread, dp, tuple(FRAMES.values()), lengths, 0, 0)
    assert sorted(r for rank in divided for r in rank[frame]) == [*range(FRAMES[frame].count)]
    units = [{r // per for r in rank[frame]} for rank in divided]
    assert sum(map(len, units)) == len(set().union(*units)), "no unit is on two ranks"
    for rank in divided:
        for above in "pabc"["pabc".index(frame) - 1 :: -1]:
            fan = FRAMES[frame].count // FRAMES[above].count
            assert {r // fan for r in rank[frame]} <= {*rank[above]}
