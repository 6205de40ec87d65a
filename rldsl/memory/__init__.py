"""How much memory each rank needs, from the lifetimes of everything that it holds.

In: a `Plan`, and the kind of device. Out: a `Curve` per class of ranks that hold the same; `curve.peak` gives its peak
and what holds it. Sequences have the maximum length of their frames, and all sizes are closed forms, so that ten
thousand ranks cost what ten do. Not counted: what CUDA, NCCL and the allocator need for themselves, text columns in
host memory, and what a computation of the flow makes of its own rows while it runs.

On "cuda" half precision has variable-length attention, and float32 torch's own; on "cpu" there is one memory, so that
what is offloaded or on its way to the disk stays in it. Plans are for "cuda"; runs are measured on "cpu" (`benchmarks/
memory.py`).
"""

from __future__ import annotations

from typing import Literal

from rldsl.memory.curve import Curve
from rldsl.memory.holder_classes import classes
from rldsl.memory.lifetimes import lifetimes
from rldsl.memory.reshard_buffers import reshard_plans
from rldsl.plan.model import Plan

Device = Literal["cuda", "cpu"]


def curves(plan: Plan, device: Device = "cuda", realloc_buffers: bool = True) -> tuple[Curve, ...]:
    """One curve per class of ranks that hold the same, in the order of their first ranks; each rank is in one class.
    realloc_buffers: whether those of reallocs count; without them the estimate is quick, and a lower bound."""
    plans = reshard_plans(plan) if realloc_buffers else {}
    return tuple(lifetimes(plan, ranks, device, plans) for ranks in classes(plan))
