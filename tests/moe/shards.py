"""Tiny mixture-of-experts models, and shards of them under any layout."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from rldsl.backends.torch import build
from rldsl.plan.layout import axis_ranks, coordinate, degree_product
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, Shard
from tests.backend_torch.shards import _axis
from tests.tiny import make_model

FAMILIES = {
    "mixtral": ("mixtral", dict(num_local_experts=4, num_hidden_layers=2)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=8, moe_intermediate_size=24, num_experts_per_tok=3, num_hidden_layers=2,
                                    norm_topk_prob=True)),
    "shared": ("qwen2_moe", dict(num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=16,
                                 num_experts_per_tok=2, num_hidden_layers=2)),
}


def make(directory: Path, name: str, head: str = "causal_lm", **more: object) -> str:
    family, sizes = FAMILIES[name]
    return str(make_model(directory, family, head, **{**sizes, **more}))


def layout_of(dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, zero: int = 0, cp: int = 1) -> Layout:
    return Layout("L0", "m0", dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero)


def shard_of(model: Model, layout: Layout, rank: int, trainable: bool) -> tuple[Shard, int] | None:
    """The shard of this rank on the first ranks of the world, and its place in dp. All ranks of the world must call."""
    mesh = Mesh("m0", ((0, degree_product(layout)),))
    groups = {axis: axis_ranks(layout, mesh, axis) for axis in ("dp", "tp", "pp", "cp", "mesh", "ep", "copies")}
    if rank >= degree_product(layout):
        for ranks in (r for found in groups.values() for r in found if len(r) > 1):
            dist.new_group(list(ranks))
        return None
    axes = Axes(**{axis: _axis(found, rank) for axis, found in groups.items()})
    shard = build(model, layout, mesh, axes, torch.device("cpu"), load=True, trainable=trainable)
    return shard, coordinate(layout, mesh, rank).dp
