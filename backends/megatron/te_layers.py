"""Linear layers and experts of Transformer Engine, as megatron-core wraps them. Imported only where it can be used.

In: whether weight gradients go straight into the optimizer's buffer. Out: classes for the layer spec.

They are those without a fused norm: a norm fused with the linear layer after it would read the residual stream in half
precision, and its weight would have another name. So parameters are named as in Megatron's own linear layers, except
for experts, which are many weights of one module (`names.py`). What the library calls `_extra_state` belongs to float8
and is no parameter: nothing calls the modules' `state_dict`.
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
    """A mixin that constructs a module without storage."""

    fused_grads = False  # whether the product that makes a weight's gradient adds it to `main_grad`

    def __init__(self, *sizes: int, config: TransformerConfig, **rest: Any):
        super().__init__(*sizes, config=_on_meta(config, self.fused_grads), **rest)  # type: ignore[call-arg]  # a mixin


def parallel_linear_classes(fused_grads: bool) -> tuple[type, type]:
    """Column-parallel and row-parallel."""
    return _subclass(TEColumnParallelLinear, fused_grads), _subclass(TERowParallelLinear, fused_grads)


def expert_submodules(fused_grads: bool) -> MLPSubmodules:
    """The weights of Megatron's `TEGroupedMLP`."""
    return MLPSubmodules(linear_fc1=_subclass(TEColumnParallelGroupedLinear, fused_grads),
                         linear_fc2=_subclass(TERowParallelGroupedLinear, fused_grads))


def _subclass(kind: type, fused_grads: bool) -> type:
    return type(kind.__name__, (OnMeta, kind), {"fused_grads": fused_grads})


def _on_meta(config: TransformerConfig, fused_grads: bool) -> TransformerConfig:
    """A config that puts a module on the meta device, like all of GPTModel: these modules name their device, whatever
    the default device is."""
    meta_config = copy(config)
    meta_config.use_cpu_initialization, meta_config.init_model_with_meta_device = False, True
    meta_config.gradient_accumulation_fusion = fused_grads
    # otherwise a module's first pass would overwrite gradients instead of adding to them
    meta_config.disable_parameter_transpose_cache = True
    return meta_config
