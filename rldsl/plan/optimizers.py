"""What an optimizer does with each parameter of a model, as pure functions of a plan's records.

In: an `Optimizer`, and a parameter's name and spec. Out: its learning rate scale, its weight decay, whether it is
frozen, which rule updates it, and the shapes of what the optimizer keeps about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod

from rldsl.plan.model import Optimizer, OptimizerKind, ParamSpec

# of these the update of an element depends on the complete parameter
NEEDS_COMPLETE: tuple[OptimizerKind, ...] = ("muon", "adafactor")

# kinds of state that are about a complete parameter, and equal on every rank that has a part of it; the others are
# divided as the parameter is
COMPLETE_STATE = frozenset({"row_var", "col_var", "variance", "exp_avg_scales", "exp_avg_sq_scales"})

# 8-bit AdamW: elements of a block, which share a scale, and of the smallest parameter whose state is quantized
BLOCK, MIN_QUANTIZED = 256, 4096
CHUNK = 1 << 22  # elements that it has in float32 at the same time


@dataclass(frozen=True, slots=True)
class ParamOptions:
    """How one parameter is trained."""

    # that updates it; `muon` leaves what is no matrix of a layer to AdamW, `adamw_8bit` what is small
    rule: OptimizerKind
    lr_scale: float  # multiplies the learning rate of the schedule
    weight_decay: float  # as `Optimizer.weight_decay`
    frozen: bool  # it has no gradient and no state


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a parameter's dotted name matches one of some shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@lru_cache(maxsize=65536)
def param_options(optimizer: Optimizer, name: str, spec: ParamSpec) -> ParamOptions:
    """The options of one parameter. Of several groups that match its name, the last one that sets an option decides.
    name: with the number of its layer."""
    rule = optimizer.kind
    if rule == "muon" and not (spec.stage == "layer" and len(spec.shape) > 1):
        rule = "adamw"
    if rule == "adamw_8bit" and prod(spec.shape) < MIN_QUANTIZED:
        rule = "adamw"
    scale = 1.0
    if optimizer.kind == "muon" and rule == "adamw" and optimizer.adamw_lr and optimizer.lr:
        scale = optimizer.adamw_lr / optimizer.lr
    decay = optimizer.weight_decay if optimizer.decay == "all" or len(spec.shape) > 1 else 0.0
    factor = 1.0
    for group in optimizer.groups:
        if matches(name, group.patterns):
            factor = factor if group.lr_scale is None else group.lr_scale
            decay = decay if group.weight_decay is None else group.weight_decay
    return ParamOptions(rule, scale * factor, decay, spec.buffer or matches(name, optimizer.freeze))


def state_shapes(optimizer: Optimizer, rule: OptimizerKind, shape: tuple[int, ...],
                 local: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """What the optimizer keeps about a parameter: kind -> shape of the tensor on this rank. shape: of the complete
    parameter. local: of this rank's part."""
    match rule:
        case "adamw":
            return {"exp_avg": local, "exp_avg_sq": local}
        case "adamw_8bit":
            blocks = (-(-prod(shape) // BLOCK),)
            return {"exp_avg_codes": local, "exp_avg_scales": blocks,
                    "exp_avg_sq_codes": local, "exp_avg_sq_scales": blocks}
        case "sgd":
            return {"momentum_buffer": local} if optimizer.momentum else {}
        case "muon":
            return {"momentum_buffer": local}
        case "adafactor":
            if len(shape) < 2:
                return {"variance": shape}
            return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


def is_quantized(kind: str) -> bool:
    """Whether a kind of state has one byte per element; all others are float32."""
    return kind.endswith("_codes")


def state_bytes(optimizer: Optimizer, rule: OptimizerKind, shape: tuple[int, ...], local: int) -> int:
    """Bytes of what the optimizer keeps about a parameter. local: elements of this rank's part."""
    return sum(prod(found) * (1 if is_quantized(kind) else 4)
               for kind, found in state_shapes(optimizer, rule, shape, (local,)).items())
