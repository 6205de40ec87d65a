"""megatron-core's GPTModel under tensor, pipeline, context and expert parallelism: `build` makes one rank's shard.

torch and megatron are imported when a shard is built, so that importing `describe` stays cheap.
Errors: RL0326 the library is missing or has another version, RL0728 tensor parallelism without CUDA, where the library
allocates its buffers.
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
    if line := lacking(DESCRIPTION):  # on this machine, whatever the compiler's had
        raise fail("RL0326", f"`{model.name}` is placed with `backend=megatron`, which is not available here",
                   notes=(why,) if (why := unfit(DESCRIPTION)) else (),
                   help=f"install it on every machine with `{line}`, or compile for `backend=torch`")
    if layout.tp > 1 and device.type != "cuda" and not _is_current(device):
        raise fail("RL0728",
                   f"megatron-core needs CUDA for tensor parallelism, but `{model.name}` runs with tp={layout.tp} on "
                   f"`{device.type}`",
                   help="without CUDA use tp=1 (pp, dp, cp and ep work as usual), or omit `backend=megatron`")
    from rldsl.backends.megatron import kernels

    for message in harmless_warnings(device.type):
        warnings.filterwarnings("ignore", message=message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about packages that are never needed
        packages = kernels.installed_packages(device.type)
        kernels.hide_unusable(packages)
        from rldsl.backends.megatron.shard import MegatronShard

        shard = MegatronShard(model, layout, mesh, axes, device, load, trainable, weight_cache)
    if axes.mesh.index == 0:
        for line in kernels.describe_kernels(shard.stage.kernels, packages):
            kernels.print_once(line)
    return shard


def harmless_warnings(device: str) -> tuple[str, ...]:
    """Of megatron-core, which say nothing to a user. On CUDA it recommends CUDA_DEVICE_MAX_CONNECTIONS=1, without which
    communication of tensor parallelism may not overlap with computation; elsewhere the variable has no meaning."""
    deprecated = "`torch.distributed.*` is deprecated"
    return (deprecated,) if device == "cuda" else (deprecated, "When using (sequence parallelism|async grad)")


def _is_current(device: torch.device) -> bool:
    """Whether the library's buffers, which it allocates on CUDA's current device, are on the shard's device."""
    import torch

    try:
        current: object = torch.cuda.current_device()  # tests replace the function by one that returns a device
        return current == device
    except (AssertionError, RuntimeError):  # no CUDA in this torch, or on this machine
        return False
