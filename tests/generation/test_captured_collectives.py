"""Decode steps with collectives in them are captured by all ranks that run them together, or by none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.backends.torch.generate.captured_step import CALLS_BEFORE_CAPTURE, CapturedSteps, CaptureSwitch
from rldsl.backends.torch.generate.op_trace import OpTrace
from rldsl.plan.events import Sampling
from rldsl.runtime.collectives import MAX_EXCHANGED, all_agree, all_gather, all_reduce
from rldsl.runtime.comm.machine_peers import share_memory
from tests.backend_torch.shards import plan_model
from tests.backend_torch.test_forward import _partial
from tests.generation.reference import made, rows_of
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

CPU = torch.device("cpu")
CALLS = CALLS_BEFORE_CAPTURE + 5
SMALL_SIZE, LARGE_SIZE = 6, MAX_EXCHANGED // 4 + 5  # an exchange of all with all, and a collective of gloo
Outputs = tuple[torch.Tensor, ...]


def plain(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    """Seen before it is captured."""
    return x * 2 if x.sum() > 0 else x


def ragged(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).masked_scatter(x > 0, x[x > 0])


def reads_memory(x: torch.Tensor) -> torch.Tensor:
    """No operator says that a number is read, so only a comparison shows that the trace is wrong."""
    return x * ctypes.c_float.from_address(x.data_ptr()).value


def _together(rank: int, size: int, alone: Callable[[torch.Tensor], torch.Tensor], through_memory: bool) -> list[Any]:
    """Each rank has a function with collectives, of which that of rank 1 does something else between them."""
    held = share_memory([(range(2), dist.group.WORLD)], None) if through_memory else ()
    assert bool(held) == through_memory
    x = torch.zeros(size)
    between = alone if rank == 1 else plain

    def step() -> Outputs:
        total = between(x)
        all_reduce(total)
        most = total + rank
        all_reduce(most, dist.ReduceOp.MAX)
        return total, most, all_gather(x).sum(0)

    steps = CapturedSteps(CPU, True, all_agree=lambda yes: all_agree(yes, dist.group.WORLD, CPU))
    faults = []
    with torch.no_grad():
        for call in range(CALLS):
            x.copy_(torch.linspace(-1, 2, size) + call + rank)
            found = [t.clone() for t in steps("key", step)]
            if not all(map(torch.equal, found, step())):
                faults.append(call)
    return [faults, steps.enabled, isinstance(steps.captures["key"], OpTrace)]


@pytest.mark.parametrize("through_memory", [False, True])
@pytest.mark.parametrize("size", [SMALL_SIZE, LARGE_SIZE])
def test_collectives_are_captured(size: int, through_memory: bool) -> None:
    assert run_world(2, _together, size, plain, through_memory) == [[[], True, True]] * 2


@pytest.mark.parametrize("through_memory", [False, True])
@pytest.mark.parametrize("alone", [branches, ragged, reads_memory])
def test_one_rank_that_cannot_stops_all(alone: Callable[[torch.Tensor], torch.Tensor], through_memory: bool) -> None:
    for faults, enabled, _ in run_world(2, _together, SMALL_SIZE, alone, through_memory):
        assert (faults, enabled) == ([], False)


LAYOUTS = {"tp": (1, 2, 1), "tp and pp": (1, 2, 2), "tp and dp": (2, 2, 1)}
DRAWN = Sampling(max_new_tokens=12, temperature=1.3, top_k=30)
PROMPTS = [[2 + (i * j) % 40 for j in range(3 + i % 4)] for i in range(6)]


def _generated(rank: int, path: str, layout: tuple[int, int, int]) -> list[Any]:
    shard: Any = _partial(plan_model(path), rank, *layout)
    found = {}
    for name, switch in (("captured", CaptureSwitch()), ("plain", CaptureSwitch(False))):
        states: dict[Any, Any] = {}
        found[name] = [rows_of(made(shard, PROMPTS, DRAWN, 4, range(len(PROMPTS)), capture=switch, states=states))
                       for _ in range(3)]
        (state,) = states.values()
        found[f"traces, {name}"] = [sum(isinstance(x, OpTrace) for x in steps.captures.values())
                                    for steps in (state.decode_steps, state.bookkeeping) if steps.captures]
    return [found["captured"] == found["plain"], found["traces, captured"], found["traces, plain"]]


@pytest.mark.parametrize("layout", thorough_between(LAYOUTS))
def test_generation_replays_steps(layout: str, tmp_path: Any) -> None:
    path = str(make_model(tmp_path / "m"))
    degrees = LAYOUTS[layout]
    for same, captured, uncaptured in run_world(degrees[0] * degrees[1] * degrees[2], _generated, path, degrees):
        assert same and min(captured) > 0 and max(uncaptured, default=0) == 0
