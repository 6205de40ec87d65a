"""NaN and infinities among the elements of a reduction: what torch gives of the same elements, on one rank and two."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rldsl.plan.expr import Level, Program
from rldsl.plan.operators import OPERATORS
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.train_event import minibatch_metrics
from tests.runtime.builder import FRAMES, Builder, tokens_of, view
from tests.world import run_world

LENS = [3, 0, 5, 1, 4, 2, 9, 1, 0, 7, 2, 6]
GEN = {"gen": FRAMES["gen"]}
SHARES = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
NAN, INF = math.nan, math.inf
BY_TORCH = {  # the reductions, of some elements
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "amin": torch.amin,
    "count": lambda x: torch.tensor(float(x.numel())), "quantile": lambda x: torch.quantile(x, 0.25),
    "median": lambda x: torch.quantile(x, 0.5),
}
REDUCTIONS = sorted(o.name for o in OPERATORS.values() if o.family == "reduction")


def elements(changes: dict[int, float]) -> Tensor:
    """A number for each token, with other ones at some places."""
    x = torch.randn(sum(LENS), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for place, number in changes.items():
        x[place] = number
    return x


def reduced(b: Builder, op: str, x: int, to: Level) -> int:
    if OPERATORS[op].arity > 1:  # a quantile, to batch
        return b.put(op, (x, b.put("const", value=0.25)), to="batch")
    return b.to(op, x, to)


def flow() -> Program:
    b = Builder()
    x = b.input("x", "token")
    return b.program(**{op: reduced(b, op, x, "batch") for op in REDUCTIONS})


def loss() -> Program:
    """The reductions as metrics; the loss itself is finite."""
    b = Builder()
    x, lp, scale = b.input("x", "token"), b.input("lp", "token"), b.input("scale", "batch")
    return b.program(loss=b.to("mean", lp, "batch"), scale=scale,
                     **{op: reduced(b, op, x, "batch") for op in REDUCTIONS})


def same(got: float, want: Tensor) -> bool:
    return math.isnan(got) and bool(want.isnan()) or math.isclose(got, float(want), rel_tol=1e-12)


def by_torch(op: str, x: Tensor) -> Tensor:
    """What torch gives; where it interpolates between infinities, the limit."""
    if op in ("median", "quantile") and not x.isnan().any():
        ordered, at = x.sort().values, (x.numel() - 1) * (0.5 if op == "median" else 0.25)
        low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
        return low if low == high else low * (math.ceil(at) - at) + high * (at - math.floor(at))
    return BY_TORCH[op](x)


CHANGES = [{0: NAN}, {20: NAN}, {39: NAN}, {4: NAN, 30: INF}, {i: NAN for i in range(40)}, {7: INF}, {7: -INF},
           {i: INF for i in range(40)}, {i: -INF for i in range(40)}]


def test_every_reduction_is_compared() -> None:
    assert set(BY_TORCH) == set(REDUCTIONS) and sum(LENS) == 40


@pytest.mark.parametrize("to", ["seq", "prompt"])
@pytest.mark.parametrize("op", [op for op in REDUCTIONS if OPERATORS[op].arity == 1])
def test_nan_makes_its_own_group_nan_and_no_other(op: str, to: Level) -> None:
    b = Builder()
    program = b.program(y=b.to(op, b.input("x", "token"), to))
    for changes in CHANGES:
        x = elements(changes)
        parts = list(x.split(LENS))
        groups = parts if to == "seq" else [torch.cat(parts[i : i + 3]) for i in range(0, 12, 3)]
        got = run_compute(program, {"x": x}, {"gen": view("gen", list(range(12)), LENS)}, GEN, None, lambda _: x)["y"]
        for group, y in zip(groups, got.tolist(), strict=True):
            assert same(y, by_torch(op, group)) if len(group) else y == 0, (changes, group)


def run_flow(rank: int, shares: list[list[int]]) -> list[dict[str, float]]:
    import torch.distributed as dist

    rows, found = shares[rank], []
    for changes in CHANGES:
        x = tokens_of(elements(changes), LENS, rows)
        out = run_compute(flow(), {"x": x}, {"gen": view("gen", rows, LENS)}, GEN,
                          dist.group.WORLD if len(shares) > 1 else None, lambda _: x)
        found.append({name: float(y) for name, y in out.items()})
    return found


def run_loss(rank: int, shares: list[list[int]]) -> list[dict[str, float]]:
    import torch.distributed as dist

    found = []
    for changes in CHANGES:
        x, program = elements(changes), loss()
        run = MinibatchLoss(program, loss_counts(program, GEN, list(range(12)), {"gen": LENS}))
        for rows in (shares[rank][:2], shares[rank][2:]) if shares[rank] else ():
            mine = tokens_of(x, LENS, rows)
            run({"x": mine, "lp": torch.zeros_like(mine, requires_grad=True), "scale": x[0]},
                {"gen": view("gen", rows, LENS)})
        found += minibatch_metrics([run], True, dist.group.WORLD if len(shares) > 1 else None, torch.device("cpu"))
    return found


@pytest.mark.parametrize("run", [run_flow, run_loss])
@pytest.mark.parametrize("shares", [[list(range(12))], SHARES, SHARES[::-1], [list(range(12)), []]],
                         ids=["1 rank", "2 ranks", "2 ranks, swapped", "2 ranks, one without rows"])
def test_nan_anywhere_makes_the_whole_nan(run, shares: list[list[int]]) -> None:
    found = [run(0, shares)] if len(shares) == 1 else run_world(2, run, shares)
    for numbers in found:
        for changes, got in zip(CHANGES, numbers, strict=True):
            x = elements(changes)
            for op in REDUCTIONS:
                assert same(got[op], by_torch(op, x)), (op, changes, got[op])
            assert same(got.get("scale", float(x[0])), x[0])
            assert got.get("loss", 0.0) == 0
