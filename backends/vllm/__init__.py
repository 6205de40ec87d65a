"""vLLM as the engine of generate calls: `build` makes one rank's copy of a model, with its own engine process.

torch is imported when a shard is built, and vLLM only by the engine process, so that importing `describe` stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rldsl.plan.model import Layout, Mesh, Model

if TYPE_CHECKING:
    import torch

    from rldsl.backends.vllm.shard import VllmShard
    from rldsl.runtime.backend import Axes, Images, WeightCache


def build(model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
          trainable: bool, weight_cache: WeightCache | None = None, images: Images | None = None) -> VllmShard:
    """See `rldsl.runtime.backend.Build`. images: of other models of the run."""
    from rldsl.backends.vllm.shard import VllmShard

    return VllmShard(model, layout, mesh, axes, device, load, weight_cache)
