"""megatron-core's GPTModel under tensor, pipeline and context parallelism: `build` makes one rank's shard.

torch and megatron are imported when a shard is built, so that `describe` stays light.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from rldsl.plan.model import Layout, Mesh, Model

if TYPE_CHECKING:
    import torch

    from rldsl.runtime.backend import Axes, Pool, Shard


def build(model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
          trainable: bool, pool: Pool | None = None) -> Shard:
    """See `rldsl.runtime.backend.Build`."""
    warnings.filterwarnings("ignore", message="When using (sequence parallelism|async grad)")  # of speed, at each run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are never needed
        from rldsl.backends.megatron.shard import MegatronShard

        return MegatronShard(model, layout, mesh, axes, device, load, trainable, pool)
