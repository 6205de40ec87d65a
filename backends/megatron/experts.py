"""Mixture-of-experts layers: Megatron's router and experts, and how tokens travel between them.

In: a layer's config, the ranks that divide each of its experts (`tp`) and those that divide the experts among
themselves (`ep`), and the kernels to use. Out: a module in the place of an MLP.

Rows go to their experts as in the torch backend (`torch/model/experts.py`): a copy for each expert that a token chose,
by an all-to-all of ragged sizes, none dropped. Megatron's own dispatchers are not used: they are written for CUDA
streams, and for groups over tp and ep together. Experts compute one after another, or with Transformer Engine all in
one product.

Between sublayers tokens are divided over tp. Each rank routes its own, so a router's gradient is a partial sum; then
rows and weights of all are gathered, every rank computes its columns of every expert, and gets its tokens of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from rldsl.backends.megatron.kernels import Kernels
from rldsl.backends.torch.kernels.opaque_calls import opaque_on_cpu
from rldsl.backends.torch.model.collectives import (
    all_gather,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from rldsl.backends.torch.model.experts import TokenDispatcher
from rldsl.runtime.backend import Axis


class Router(TopKRouter):  # type: ignore[misc]  # megatron has no type hints
    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """The library's product uses Transformer Engine first, and 0.16 does not notice that it is missing."""
        return F.linear(input, self.weight)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """There is none; the library's function would be compiled to find that out."""


class Experts(nn.Module):
    """Megatron constructs modules itself, so a subclass carries what else they need (`experts_class`)."""

    tp: Axis                        # tensor parallel ranks
    ep: Axis                        # ranks that divide the experts
    groups: ProcessGroupCollection  # the same axes, as Megatron wants them
    kernels: Kernels                # which implementations to use

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.router = Router(config, self.groups)
        count = config.num_moe_experts // self.ep.size
        self.experts: nn.Module
        if self.kernels.linear:
            from rldsl.backends.megatron.te_layers import expert_submodules

            self.experts = TEGroupedMLP(count, config, expert_submodules(bool(self.kernels.weight_grads)), self.groups)
        else:
            self.experts = SequentialMLP(count, config, MLPSubmodules(
                linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), self.groups)

    def forward(self, hidden: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, None]:
        """hidden: [T, 1, H] of this rank's tokens; so is the result."""
        return opaque_on_cpu(self._run, hidden), None

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(hidden)  # [T, experts]
        x = hidden[:, 0]
        if self.tp.size > 1:
            x = gather_from_sequence_parallel_region(x, self.tp, tensor_parallel_output_grad=True)
            weights = gather_from_sequence_parallel_region(weights, self.tp, tensor_parallel_output_grad=True)
            chosen = all_gather(chosen.to(torch.uint8), self.tp).bool()
        expert, token = chosen.T.nonzero(as_tuple=True)  # pairs, sorted by expert
        rows, row_weights, counts = x[token], weights[token, expert], chosen.sum(0)
        if self.ep.size > 1:
            dispatcher = TokenDispatcher.of(counts[:, None], self.ep)
            computed, _ = self.experts(dispatcher.dispatch(rows), dispatcher.counts[:, 0],
                                       dispatcher.dispatch(row_weights[:, None])[:, 0])
            computed = dispatcher.combine(computed)
        else:
            computed, _ = self.experts(rows, counts, row_weights)
        out = x.new_zeros(x.shape, dtype=torch.float32).index_add(0, token, computed.float())
        if self.tp.size > 1:
            out = reduce_scatter_to_sequence_parallel_region(out, self.tp)
        return out[:, None]


def experts_class(tp: Axis, ep: Axis, groups: ProcessGroupCollection, kernels: Kernels) -> type[Experts]:
    """The module's class on this rank."""
    return type("Experts", (Experts,), {"tp": tp, "ep": ep, "groups": groups, "kernels": kernels})
