"""HuggingFace models under tensor and pipeline parallelism: `build` makes one rank's shard."""

from __future__ import annotations

import torch

from rldsl.backends.torch.shard import TorchShard
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, Pool, Shard


def build(model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
          trainable: bool, pool: Pool | None = None) -> Shard:
    """See `rldsl.runtime.backend.Build`."""
    return TorchShard(model, layout, mesh, axes, device, load, trainable, pool)
