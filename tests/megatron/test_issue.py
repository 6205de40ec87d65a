"""Calls on Megatron use their communicators in the order of the torch backend's, as its description says."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl import api
from rldsl.plan.codec import encode
from tests.megatron.shards import needed, on_cpu
from tests.verify import test_issue as torch_calls
from tests.verify.test_issue import PROGRAM
from tests.verify.plans import folder
from tests.world import run_world

needed()


class Done:
    def wait(self) -> None:
        """It is."""


def gathered(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    dist.all_gather(list(out.chunk(group.size())), x.contiguous(), group=group)
    return Done()


def scattered(out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    total = x.clone()
    dist.all_reduce(total, group=group)
    out.copy_(total.chunk(group.size())[group.rank()])
    return Done()


def recorded(rank: int, data: bytes, out: str, here: str) -> Any:
    """What a rank asked torch.distributed for in each event, the same one after the other as once."""
    from megatron.core.tensor_parallel import layers, mappings

    on_cpu()
    for module in (layers, mappings):  # which keep functions of their own, that would not be noted
        module.dist_all_gather_func, module.dist_reduce_scatter_func = gathered, scattered
    asked = torch_calls.recorded(rank, data, out, here)
    return {event: [key for key, _ in groupby(uses)] for event, uses in asked.items()}


@pytest.mark.parametrize("degrees, more", [("tp=2 pp=2", ""), ("dp=2 pp=2", "vpp=2")])
def test_calls_issue_what_those_of_torch_do(degrees: str, more: str, tmp_path: Path) -> None:
    with folder() as here:
        found = []
        for i, backend in enumerate(("", " backend=megatron")):
            (here / "p.rlf").write_text(PROGRAM.format(degrees + backend, more))
            found.append(run_world(4, recorded, encode(api.compile("p.rlf")), str(tmp_path / str(i)), str(here)))
    for theirs, mine in zip(*found, strict=True):
        assert mine == theirs and len(theirs) > 3
