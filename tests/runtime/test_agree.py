"""Ranks agree on what happened, and on what only one of them looked up."""

from __future__ import annotations

import pytest
import torch

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import Layout, Mesh
from rldsl.runtime.comm.agreement import agree, anywhere, from_all, from_first, others_than_first
from rldsl.runtime.comm.world import World
from tests.world import run_world

CPU = torch.device("cpu")
TEXTS = ["", "a", "é" * 1000]


def _rank(rank: int) -> tuple[object, ...]:
    import torch.distributed as dist

    every = dist.group.WORLD
    flags = anywhere((rank == 1, False, True), every, CPU)
    alone = anywhere((rank == 1,), None, CPU)
    texts = [from_first(text if rank == 0 else "another", CPU) for text in TEXTS]
    texts += [from_all(text * rank, CPU) for text in TEXTS]
    differ = others_than_first(b"same" if rank != 2 else b"other", CPU), others_than_first(b"", CPU)
    agree((), every, CPU)
    try:
        agree((Diagnostic("RL0706", "no"),) if rank == 1 else (), every, CPU)
        said = None
    except Failure as failure:
        said = [d.code for d in failure.diagnostics]
    return flags, alone, texts, differ, said


def test_three_ranks() -> None:
    for rank, (flags, alone, texts, differ, said) in enumerate(run_world(3, _rank)):
        assert flags == (True, False, True) and alone == (rank == 1,)
        assert texts == [*TEXTS, *([text * r for r in range(3)] for text in TEXTS)] and differ == ([2], [])
        assert said == (["RL0706"] if rank == 1 else [])


def test_a_group_that_the_plan_lacks_is_not_one_rank() -> None:
    mesh, layout = Mesh("m", ((0, 2),)), Layout("x", "m", dp=2)
    world = World(0, CPU, {"m": mesh, "one": Mesh("one", ((0, 1),))}, {"x": layout})
    assert world.group("one") is None
    with pytest.raises(KeyError):
        world.group("m")
    with pytest.raises(KeyError):
        world.axes(layout)
