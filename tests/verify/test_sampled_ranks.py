"""Of many ranks a sample is checked. It shows every mistake of the planner that a check of all ranks shows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from rldsl.diag import InternalError
from rldsl.plan.model import Layout, Mesh
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.verify import transfer_slices
from rldsl.verify.transfer_slices import MeshCells
from tests.plan_algebra.models import model

WORLD = 128
PAIRS = [  # (ranks, tp, pp) of source and destination; 8 devices a node
    (((0, 128), 4, 2), ((0, 128), 2, 1)), (((0, 64), 4, 2), ((0, 128), 8, 1)), (((0, 8), 2, 1), ((0, 128), 1, 1)),
    (((0, 16), 8, 2), ((16, 128), 2, 2)), (((64, 128), 8, 1), ((0, 96), 1, 2)), (((0, 4), 2, 2), ((8, 128), 4, 1)),
]


def side(name: str, ranks: tuple[int, int], tp: int, pp: int) -> tuple[Layout, Mesh]:
    mesh = Mesh(name, (ranks,))
    return Layout(f"L{name}", name, dp=(ranks[1] - ranks[0]) // (tp * pp), tp=tp, pp=pp), mesh


def made(pair: tuple[Any, Any]) -> tuple[ReshardPlan, MeshCells, MeshCells]:
    (src, a), (dst, b) = side("a", *pair[0]), side("b", *pair[1])
    return plan_reshard(model(), src, a, dst, b, 8), MeshCells.of(src, a), MeshCells.of(dst, b)


def whole(p: ReshardPlan, src: MeshCells, dst: MeshCells, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    with monkeypatch.context() as here:
        here.setattr(transfer_slices, "CHECK_ALL_UP_TO", 10 * WORLD)
        return some(p, src, dst)


def some(p: ReshardPlan, src: MeshCells, dst: MeshCells) -> set[str]:
    try:
        return {code for code, _, _ in transfer_slices.slice_faults(p, src, dst, WORLD)}
    except (LookupError, ZeroDivisionError, InternalError, TypeError, AttributeError, RuntimeError) as wrong:
        return {type(wrong).__name__}  # paths that no rank can follow; ours are never such


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_right_paths_have_no_fault(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    p, src, dst = made(pair)
    assert some(p, src, dst) == whole(p, src, dst, monkeypatch) == set()
    assert len(transfer_slices.sampled_ranks(p, src, dst)) < len(src.cells.keys() | dst.cells.keys())


def numbers(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all whole numbers in a record, but for the boxes, the cells of ranks and what follows from others."""
    found: list[tuple[Any, ...]] = []
    if isinstance(node, int):
        return [path]
    if is_dataclass(node):
        for f in fields(node):
            if f.init and f.name not in ("classes", "cells", "src", "dst", "devices", "busiest"):
                found += numbers(getattr(node, f.name), (*path, f.name))
    elif isinstance(node, Mapping):
        for k, v in node.items():
            found += numbers(v, (*path, k))
    elif isinstance(node, tuple):
        for i, v in enumerate(node):
            found += numbers(v, (*path, i))
    return found


def put(node: Any, path: tuple[Any, ...], change: int) -> Any:
    if not path:
        return node + change
    step, rest = path[0], path[1:]
    if is_dataclass(node):
        return replace(node, **{step: put(getattr(node, step), rest, change)})  # type: ignore[type-var]
    if isinstance(node, Mapping):
        return {**node, step: put(node[step], rest, change)}
    values = (*node[:step], put(node[step], rest, change), *node[step + 1 :])
    return type(node)(*values) if hasattr(node, "_fields") else values


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_some_ranks_show_what_all_would_show(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of the paths one larger or smaller."""
    p, src, dst = made(pair)
    draw = random.Random(1)
    ways, wrong = numbers(p), 0
    for _ in range(12):
        try:
            mutant = put(p, draw.choice(ways), draw.choice((-1, 1)))
        except LookupError:  # no such record can be made
            continue
        seen = some(mutant, src, dst)
        if seen:
            wrong += 1
        else:
            assert not whole(mutant, src, dst, monkeypatch), mutant
    assert wrong >= 4
