"""HuggingFace models under tensor, pipeline, context and expert parallelism: `build` makes one rank's shard.

torch is imported when a shard is built, so that importing `describe` stays cheap.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from rldsl import garbage_collection
from rldsl.plan.model import Layout, Mesh, Model

if TYPE_CHECKING:
    import torch

    from rldsl.backends.torch.shard import TorchShard
    from rldsl.runtime.backend import Axes, Images, Shard, WeightCache


def build(model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
          trainable: bool, weight_cache: WeightCache | None = None, images: Images | None = None) -> Shard:
    """See `rldsl.runtime.backend.Build`."""
    return _shard_class()(model, layout, mesh, axes, device, load, trainable, weight_cache, images)


def arithmetic(device: torch.device) -> str:
    """What a rank computes with besides torch: kernels in C, where they can be compiled."""
    from rldsl.backends.torch.kernels import kernel_library

    if device.type != "cpu":
        return ""
    return "kernels in C" if kernel_library.available() else "no kernels in C"


@cache
def _shard_class() -> type[TorchShard]:
    with garbage_collection.importing():
        from rldsl.backends.torch.shard import TorchShard

    return TorchShard
