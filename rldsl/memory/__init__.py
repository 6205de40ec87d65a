"""How much memory each rank needs, from the lifetimes of everything that it holds.

In: a `Plan`, and the kind of device. Out: a `Curve` for each set of ranks that hold the same; `curve.peak` gives its
largest moment and holders. Bounded by the frames' limits, in closed form, so that ten thousand ranks cost what ten do.
Not counted: what CUDA, NCCL and the allocator take for themselves, and text columns in host memory.

On "cuda" half precision has variable-length attention, and float32 torch's own; on "cpu" there is one memory, so that
what is offloaded or on its way to the disk stays in it. Plans are for "cuda"; runs are measured on "cpu" (`benchmarks/
memory.py`).
"""

from __future__ import annotations

from typing import Literal

from rldsl.memory.curve import Curve
from rldsl.memory.holder_classes import classes
from rldsl.memory.lifetimes import lifetimes
from rldsl.memory.reshard_buffers import ways
from rldsl.plan.model import Plan

Device = Literal["cuda", "cpu"]


def curves(plan: Plan, device: Device = "cuda") -> tuple[Curve, ...]:
    """One for each set of ranks that hold the same, in the order of their first ranks; each rank is in one."""
    known = ways(plan)
    return tuple(lifetimes(plan, ranks, device, known) for ranks in classes(plan))
