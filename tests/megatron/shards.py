"""Shards on Megatron in gloo worlds. What the library asks CUDA for is put on the CPU here, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.plan.layout import axis_ranks, coordinate, degree_product
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes
from tests import world
from tests.backend_torch.shards import _axis

LOADED = "rldsl.backends.megatron.shard"
WITHOUT = "megatron-core is not installed: pip install 'rldsl[megatron]'"


def needed() -> None:
    """Skip a module, or a test, where the library is missing; where it is not, worlds load it once."""
    pytest.importorskip("megatron.core", reason=WITHOUT)
    if LOADED not in world._PRELOAD:
        world._PRELOAD.append(LOADED)


def on_cpu() -> None:
    """Buffers of tensor parallelism are made on the device that is current."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def layout_of(dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, vpp: int = 1, ep: int = 1, zero: int = 0) -> Layout:
    return Layout("L0", "m0", dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=ep, zero=zero, backend="megatron")


def shard_of(model: Model, layout: Layout, rank: int, trainable: bool = False) -> tuple[Any, int] | None:
    """The shard of this rank on the first ranks of the world, and its place in dp. All ranks of the world must call."""
    from rldsl.backends.megatron import build

    on_cpu()
    mesh = Mesh("m0", ((0, degree_product(layout)),))
    groups = {axis: axis_ranks(layout, mesh, axis) for axis in ("dp", "tp", "pp", "cp", "mesh", "ep", "copies")}
    if rank >= degree_product(layout):
        for ranks in (r for found in groups.values() for r in found if len(r) > 1):
            dist.new_group(list(ranks))
        return None
    axes = Axes(**{axis: _axis(found, rank) for axis, found in groups.items()})
    shard = build(model, layout, mesh, axes, torch.device("cpu"), load=True, trainable=trainable)
    return shard, coordinate(layout, mesh, rank).dp
