"""Ranks agree on what happened, and on what only one of them looked up."""

from __future__ import annotations

import pytest
import torch

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import Layout, Mesh
from rldsl.runtime.comm.agreement import any_rank, broadcast_text, gather_texts, raise_together, ranks_that_differ
from rldsl.runtime.comm.world import World
from tests.world import run_world

CPU = torch.device("cpu")
TEXTS = ["", "a", "é" * 1000]


def _rank(rank: int) -> tuple[object, ...]:
    import torch.distributed as dist

    every = dist.group.WORLD
    flags = any_rank((rank == 1, False, True), every, CPU)
    alone = any_rank((rank == 1,), None, CPU)
    texts = [broadcast_text(text if rank == 0 else "another", CPU) for text in TEXTS]
    texts += [gather_texts(text * rank, CPU) for text in TEXTS]
    differ = ranks_that_differ(b"same" if rank != 2 else b"other", CPU), ranks_that_differ(b"", CPU)
    raise_together((), every, CPU)
    try:
        raise_together((Diagnostic("RL0706", "no"),) if rank == 1 else (), every, CPU)
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
