"""Calls on Megatron use their communicators in the order that is written down for the torch backend, as its description
says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl import api
from rldsl.plan.codec import encode
from tests.megatron.shards import needed, on_cpu
from tests.verify import test_issue as torch_calls
from tests.verify.plans import folder
from tests.verify.test_issue import PROGRAM
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
    """As `verify.test_issue.recorded`."""
    from megatron.core.tensor_parallel import layers, mappings

    on_cpu()
    for module in (layers, mappings):  # which keep functions of their own, that would not be noted
        module.dist_all_gather_func, module.dist_reduce_scatter_func = gathered, scattered
    return torch_calls.recorded(rank, data, out, here)


@pytest.mark.thorough
@pytest.mark.parametrize("degrees, more", [("tp=2 pp=2", ""), ("dp=2 pp=2", "vpp=2")])
def test_calls_issue_what_is_written_down(degrees: str, more: str, tmp_path: Path) -> None:
    with folder() as here:
        (here / "p.rlf").write_text(PROGRAM.format(degrees + " backend=megatron", more))
        data = encode(api.compile("p.rlf"))
        torch_calls.keep_to_it(data, run_world(4, recorded, data, str(tmp_path / "out"), str(here)))
