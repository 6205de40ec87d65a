"""Shards for tests: real directories, layouts made by hand, one gloo world."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rldsl.backends.torch import build
from rldsl.placement.families import describe
from rldsl.plan.layout import axis_ranks
from rldsl.plan.model import Layout, Mesh, Model, Optimizer
from rldsl.runtime.backend import Axes, Axis, Packed, Pool, Shard


def plan_model(path: str, kind: str = "causal_lm", optimizer: Optimizer | None = None, updates: int = 10,
               dtype: str = "float32") -> Model:
    family = describe(path, kind)
    return Model("m", kind, path, dtype, family.params, family.layers, family.config_digest,
                 "L0" if optimizer else "", optimizer, updates)


def make_shard(model: Model, rank: int, dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1,
               pool: Pool | None = None) -> Shard:
    """This rank's shard on ranks 0..dp*tp*pp*cp; every rank of the world must call it."""
    mesh = Mesh("m0", ((0, dp * tp * pp * cp),))
    layout = Layout("L0", "m0", dp=dp, tp=tp, pp=pp, cp=cp)
    axes = {axis: _axis(axis_ranks(layout, mesh, axis), rank) for axis in ("dp", "tp", "pp", "cp", "mesh")}
    return build(model, layout, mesh, Axes(**axes), torch.device("cpu"), load=True,
                 trainable=model.optimizer is not None, pool=pool)


def _axis(groups: Sequence[tuple[int, ...]], rank: int) -> Axis:
    found = None
    for ranks in groups:
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            found = Axis(ranks, ranks.index(rank), group)
    assert found is not None
    return found


def pack(rows: Sequence[tuple[list[int], list[int]]], first: int = 0) -> Packed:
    """(prompt, response) pairs as rows first, first + 1, ..."""
    return Packed(torch.arange(first, first + len(rows)), torch.tensor([len(p) for p, _ in rows], dtype=torch.long),
                  torch.tensor([len(r) for _, r in rows], dtype=torch.long),
                  torch.tensor([t for p, r in rows for t in p + r], dtype=torch.long))


def ragged(count: int, vocab: int, seed: int = 0, longest: int = 7) -> list[tuple[list[int], list[int]]]:
    """Prompts of 1.. tokens and responses of 0.. tokens."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int) -> list[int]:
        n = int(torch.randint(low, longest, (1,), generator=g))
        return torch.randint(2, vocab, (n,), generator=g).tolist()

    return [(draw(1), draw(0)) for _ in range(count)]
