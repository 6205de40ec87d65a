"""megatron-core's GPTModel under tensor, pipeline and context parallelism: `build` makes one rank's shard.

torch and megatron are imported when a shard is built, so that `describe` stays light.
Errors: RL0326 the library is not there, or another version of it, RL0728 tensor parallelism without CUDA, where the
library makes its buffers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from rldsl.backends.megatron.describe import DESCRIPTION

from rldsl.diag import fail
from rldsl.plan.backends import lacking, unfit
from rldsl.plan.model import Layout, Mesh, Model

if TYPE_CHECKING:
    import torch

    from rldsl.runtime.backend import Axes, Shard, WeightCache


def build(model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, *, load: bool,
          trainable: bool, weight_cache: WeightCache | None = None) -> Shard:
    """See `rldsl.runtime.backend.Build`."""
    if line := lacking(DESCRIPTION):  # here, whatever there was where the plan was compiled
        raise fail("RL0326", f"`{model.name}` is placed with `backend=megatron`, which cannot be used here",
                   notes=(why,) if (why := unfit(DESCRIPTION)) else (),
                   help=f"install it with `{line}`, on every machine")
    if layout.tp > 1 and device.type != "cuda" and not _current(device):
        raise fail("RL0728", f"megatron-core divides layers on CUDA devices alone, and `{model.name}` runs here with "
                   f"tp={layout.tp} on `{device.type}`", help="without CUDA give tp=1 (pp, dp, cp and ep are as "
                   "elsewhere), or leave `backend=megatron` out")
    from rldsl.backends.megatron import kernels

    for of_speed_or_age in ("When using (sequence parallelism|async grad)", "`torch.distributed.*` is deprecated"):
        warnings.filterwarnings("ignore", message=of_speed_or_age)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that are never needed
        there = kernels.found(device.type)
        kernels.hide(there)
        from rldsl.backends.megatron.shard import MegatronShard

        shard = MegatronShard(model, layout, mesh, axes, device, load, trainable, weight_cache)
    if axes.mesh.index == 0:
        for line in kernels.notes(shard.stage.kernels, there):
            kernels.tell(line)
    return shard


def _current(device: torch.device) -> bool:
    """Whether what the library makes on CUDA's current device lies where the shard does."""
    import torch

    try:
        return torch.cuda.current_device() == device
    except (AssertionError, RuntimeError):  # no CUDA in this torch, or on this machine
        return False
