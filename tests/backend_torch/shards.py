"""Shards for tests: real directories, layouts made by hand, one gloo world."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from rldsl.models.families import describe
from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.runtime.backend import Axes, Axis, Images, PackedBatch, Shard, WeightCache
from rldsl.sharding.layout import axis_ranks, coordinate, degree_product
from tests.gpu import shared_device

DEVICE = shared_device.device() or torch.device("cpu")


def plan_model(path: str, kind: str = "causal_lm", optimizer: Optimizer | None = None, updates: int = 10,
               dtype: str = "float32") -> Model:
    family = describe(path, kind)
    return Model("m", kind, path, dtype, family.params, family.layers, family.config_digest,
                 "L0" if optimizer else "", optimizer, updates)


def layout_of(**degrees: int) -> Layout:
    return Layout("L0", "m0", **degrees)


def shard_of(model: Model, layout: Layout, rank: int, trainable: bool = False,
             weight_cache: WeightCache | None = None, images: Images | None = None) -> tuple[Shard, int] | None:
    """The shard of this rank on the first ranks of the world, on the layout's backend, and its place in dp. All ranks
    of the world must call."""
    mesh = Mesh("m0", ((0, degree_product(layout)),))
    groups = {axis: axis_ranks(layout, mesh, axis) for axis in ("dp", "tp", "pp", "cp", "mesh", "ep", "expert_dp")}
    if rank >= degree_product(layout):
        for ranks in (r for found in groups.values() for r in found if len(r) > 1):
            dist.new_group(list(ranks))
        return None
    axes = Axes(**{axis: _axis(found, rank) for axis, found in groups.items()})
    build = importlib.import_module(f"rldsl.backends.{layout.backend}").build
    shard = build(model, layout, mesh, axes, DEVICE, load=True, trainable=trainable,
                  weight_cache=weight_cache, **({"images": images} if images else {}))
    return shard, coordinate(layout, mesh, rank).dp


def make_shard(model: Model, rank: int, dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1,
               weight_cache: WeightCache | None = None) -> Shard:
    """This rank's shard on all ranks of the world, trained where the model is."""
    made = shard_of(model, layout_of(dp=dp, tp=tp, pp=pp, cp=cp), rank, model.optimizer is not None, weight_cache)
    assert made is not None, "the world is larger than the layout"
    return made[0]


def _axis(groups: Sequence[tuple[int, ...]], rank: int) -> Axis:
    found = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            found = Axis(ranks, ranks.index(rank), group)
    assert found is not None
    return found


def pack(rows: Sequence[tuple[list[int], list[int]]], first: int = 0) -> PackedBatch:
    """(prompt, response) pairs as rows first, first + 1, ..."""
    return PackedBatch(torch.arange(first, first + len(rows), device=DEVICE), *(
        torch.tensor(numbers, dtype=torch.long, device=DEVICE) for numbers in (
            [len(p) for p, _ in rows], [len(r) for _, r in rows], [t for p, r in rows for t in p + r])))


def ragged(count: int, vocab: int, seed: int = 0, longest: int = 7) -> list[tuple[list[int], list[int]]]:
    """Prompts of 1.. tokens and responses of 0.. tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int) -> list[int]:
        n = int(torch.randint(low, longest, (1,), generator=g))
        return torch.randint(2, vocab, (n,), generator=g).tolist()

    return [(draw(1), draw(0)) for _ in range(count)]
