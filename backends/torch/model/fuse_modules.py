"""Norms and layers of a model, run with fewer kernels where its numbers allow it.

In: the modules of a model on this rank. Out: the same modules with other forwards. Under `invariant=training` a norm
sums the gradient of its weight in one order, which only norms of known kinds can.
Errors: RL0330 `invariant=training` under tp or cp needs norms that the family does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rldsl.backends.torch.kernels.embeddings import use_cpu_embedding
from rldsl.backends.torch.kernels.linear_layers import use_cpu_linear
from rldsl.backends.torch.kernels.rms_norms import fuse_norms
from rldsl.backends.torch.model.fused_layers import fuse_layers, fuse_ordered_layers
from rldsl.backends.torch.model.gradient_sums import HeadKind, HeadSums, Norms
from rldsl.backends.torch.model.other_experts import make_calls_of_experts
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.diag import Failure, fail
from rldsl.plan.adapter_names import module_of
from rldsl.plan.model import Model
from rldsl.runtime.backend import Axis


def fuse_modules(skeleton: nn.Module, model: Model, device: torch.device) -> None:
    """Let norms and layers run with fewer kernels, in any model but one with `invariant=training`."""
    any_order = not model.invariant  # else sums have a fixed order, which fused layers do not keep
    on_cpu = device.type == "cpu"
    norms = fuse_norms(skeleton, device, library=device.type == "cuda" and any_order, compiled=on_cpu and any_order)
    if on_cpu:
        make_calls_of_experts(skeleton)
    if any_order:
        fuse_layers(skeleton, device, norms)
        if on_cpu:
            use_cpu_linear(skeleton)
            use_cpu_embedding(skeleton)
    elif on_cpu:
        fuse_ordered_layers(skeleton)


def fuse_ordered_norms(skeleton: nn.Module, model: Model, device: torch.device, sums: HeadSums, cp: Axis,
                       row_groups: Callable[[], RowGroups]) -> bool:
    """Let norms sum the gradients of their weights in one order. row_groups: those of the pass under way. Returns
    whether every vector is that of such a norm or of a linear layer: then a pass may have several leaves.
    Errors: RL0330."""
    if device.type == "cpu":
        fuse_ordered_layers(skeleton)
    kinds = _head_norms(model)
    fused = fuse_norms(skeleton, device,
                       lambda name: Norms(sums, kinds.get(_without_number(name)), row_groups))
    vectors = [name for name, module in skeleton.named_modules()
               if name not in fused and not isinstance(module, nn.Linear | Conv1D)
               and any(p.dim() == 1 for p in module.parameters(recurse=False))]
    if vectors and cp.size > 1:
        raise _refused(model, "cp", f"{vectors[0]} is neither a linear layer nor a root-mean-square norm with a plain "
                       "weight")
    others = {*kinds} - {_without_number(name) for name in fused}
    if others and sums.tp.size > 1:
        raise _refused(model, "tp", f"{min(others)} reads what tp divides, and is of another kind than "
                       "root-mean-square norms with a plain weight")
    return not vectors


def _head_norms(model: Model) -> dict[str, HeadKind]:
    """Norms of heads that tp divides -> of which heads. A frozen base has its norms' activations too."""
    specs = (*model.params, *(p for p in model.base if "norm" in p.name))
    return {spec.name.rpartition(".")[0]: "query" if "q_norm" in spec.name else "kv"
            for spec in specs if spec.partial_grad and not module_of(spec.name)}


def _refused(model: Model, degree: str, why: str) -> Failure:
    return fail("RL0330", f"`{model.name}` cannot be trained with `invariant=training` under {degree}",
                place=str(model.path), label=why, help=f"train it with {degree}=1, or with `invariant=true`")


def _without_number(module: str) -> str:
    """As in the names of `ParamSpec`: "{}" for the number of the layer."""
    return re.sub(r"\.\d+\.", ".{}.", module, count=1)
