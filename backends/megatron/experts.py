"""Mixture-of-experts layers: Megatron's router and experts, and the way of tokens between them.

In: a layer's config, the ranks that divide each of its experts (`tp`) and those that share them (`ep`), and which
kernels there are. Out: a module in the place of an MLP. Rows go to their experts as in the torch backend
(`torch/model/experts.py`): a copy for each expert that a token chose, by an all-to-all of ragged sizes, none dropped.
Megatron's own dispatchers are not used: they are written for CUDA's streams, and for groups over tp and ep together.
Experts compute one after the other, or with Transformer Engine all in one product.

Between sublayers tokens are divided over tp. Each rank routes its own, so a router's gradient is a part of a sum; then
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
from rldsl.backends.megatron.kernels import Kernels
from rldsl.backends.torch.model.collectives import GatherApart, SumApart, gather
from rldsl.backends.torch.model.experts import Route
from torch import nn

from rldsl.runtime.backend import Axis


class Router(TopKRouter):
    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """The library's product asks Transformer Engine first, and 0.16 does not find out that it is missing."""
        return F.linear(input, self.weight)

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """There is none; the library's would be compiled to find that out."""


class Experts(nn.Module):
    """tp, ep: of this rank; groups: the same as Megatron wants them. A subclass sets them: Megatron builds modules."""

    tp: Axis
    ep: Axis
    groups: ProcessGroupCollection
    kernels: Kernels

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.router = Router(config, self.groups)
        count = config.num_moe_experts // self.ep.size
        if self.kernels.linear:
            from rldsl.backends.megatron.engine import experts

            self.experts = TEGroupedMLP(count, config, experts(bool(self.kernels.gradients)), self.groups)
        else:
            self.experts = SequentialMLP(count, config, MLPSubmodules(
                linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), self.groups)

    def forward(self, hidden: torch.Tensor, padding_mask: None = None) -> tuple[torch.Tensor, None]:
        """hidden: [T, 1, H] of this rank's tokens; so is what comes out."""
        weights, chosen = self.router(hidden)  # [T, experts]
        x = hidden[:, 0]
        if self.tp.size > 1:
            x, weights = GatherApart.apply(x, self.tp), GatherApart.apply(weights, self.tp)
            chosen = gather(chosen.to(torch.uint8), self.tp).bool()
        expert, token = chosen.T.nonzero(as_tuple=True)  # pairs by expert
        rows, each, counts = x[token], weights[token, expert], chosen.sum(0)
        if self.ep.size > 1:
            route = Route.of(counts, self.ep)
            made, _ = self.experts(route.there(rows), route.counts, route.there(each[:, None])[:, 0])
            made = route.back(made)
        else:
            made, _ = self.experts(rows, counts, each)
        out = x.new_zeros(x.shape, dtype=torch.float32).index_add(0, token, made.float())
        return (SumApart.apply(out, self.tp) if self.tp.size > 1 else out)[:, None], None


def experts_of(tp: Axis, ep: Axis, groups: ProcessGroupCollection, kernels: Kernels) -> type[Experts]:
    """The module as it is on this rank."""
    return type("Experts", (Experts,), {"tp": tp, "ep": ep, "groups": groups, "kernels": kernels})
