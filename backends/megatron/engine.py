"""Linear layers and experts of Transformer Engine, as megatron-core wraps them. Imported where that can be used.

In: whether gradients of matrices go straight into the optimizer's buffer. Out: classes for the layer spec. They are
those without a norm inside: a norm fused with the linear layer behind it would read the residual stream in half
precision, and would have its weight under another name. So parameters are called as in Megatron's own linear layers,
but for experts, which are many weights of one module (`names.py`). What the library calls `_extra_state` belongs to
float8 and is no parameter: state dicts are never asked for.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class OnMeta:
    """Without storage. fused: whether the product that makes a weight's gradient adds it to `main_grad`."""

    fused = False

    def __init__(self, *sizes: int, config: TransformerConfig, **rest: Any):
        super().__init__(*sizes, config=_as_read(config, self.fused), **rest)  # type: ignore[call-arg]


def linear(fused: bool) -> tuple[type, type]:
    """Column-parallel and row-parallel."""
    return _made(TEColumnParallelLinear, fused), _made(TERowParallelLinear, fused)


def experts(fused: bool) -> MLPSubmodules:
    """Of Megatron's `TEGroupedMLP`."""
    return MLPSubmodules(linear_fc1=_made(TEColumnParallelGroupedLinear, fused),
                         linear_fc2=_made(TERowParallelGroupedLinear, fused))


def _made(kind: type, fused: bool) -> type:
    return type(kind.__name__, (OnMeta, kind), {"fused": fused})


def _as_read(config: TransformerConfig, fused: bool) -> TransformerConfig:
    """On the meta device, as all of GPTModel: these modules name their device, whatever is the default."""
    own = copy(config)
    own.use_cpu_initialization, own.init_model_with_meta_device = False, True
    own.gradient_accumulation_fusion = fused
    own.disable_parameter_transpose_cache = True  # else the first pass of a module would write, and not add, gradients
    return own
