"""With what each rank rounds: the same operation on another processor, GPU or version of torch gives other last bits.

In: the device of this rank and the backends of the plan. Out: a note where ranks differ. Ranks of one tp group repeat
some computations and rely on getting the same result, so unlike machines belong on different dp or pp ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import torch

from rldsl.plan import backends
from rldsl.plan.notation import ranks_text


def arithmetic(device: torch.device, used: Iterable[str]) -> str:
    """With what this rank computes. used: backends, each of which may add what it knows (`arithmetic(device)`)."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else \
        f"{device.type} with {torch.backends.cpu.get_cpu_capability()}"
    packages = (importlib.import_module(backends.package(name)) for name in sorted(set(used)))
    more = (package.arithmetic(device) for package in packages if hasattr(package, "arithmetic"))
    return ", ".join([where, f"torch {torch.__version__}", *filter(None, more)])


def differences(found: Sequence[str]) -> str:
    """A note where ranks compute with different things ("": none). found: `arithmetic` of each rank."""
    kinds = list(dict.fromkeys(found))
    if len(kinds) == 1:
        return ""
    of = {kind: [rank for rank, own in enumerate(found) if own == kind] for kind in kinds}
    listed = "; ".join(f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {kind}" for kind, ranks in of.items())
    return f"machines differ, so ranks round differently; the ranks of a tp group should be alike ({listed})"
